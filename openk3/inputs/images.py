"""Images: any picture file, oriented, resized within the patch budget and cut into normalised 14x14 patches."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from openk3.config.json_file import JsonError, read_json
from openk3.inputs.xtml import image_prompt

Pixels = np.ndarray  # float32 [patches, 3, patch, patch]
Grid = tuple[int, int, int]  # (frames, patch rows, patch columns)

_GREY16 = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_PNG_SCALE = {"L;2": 85.0, "L;4": 17.0, "RGB;16B": 1 / 256}  # file value to the value Pillow gives


class ImageError(ValueError):
    """A picture that cannot be used; one line naming the file and what is wrong."""


@dataclass(frozen=True)
class MediaConfig:
    """`media_proc_cfg` of the released preprocessor_config.json (defaults: released), and a limit of our own."""

    patch_size: int = 14
    merge_kernel_size: int = 2
    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    in_patch_limit_each_frame: int = 16384
    in_patch_limit_video: int = 655360
    sample_fps: float = 8.0
    temporal_merge_kernel_size: int = 4
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    chessboard_square_size: int = 8
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 180
    max_pixels: int = 178_956_970  # of the file, before resizing: what a small file may unpack to

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            kind = {"int": int, "float": (int, float)}.get(str(spec.type))
            if kind and (isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= _MOST):
                raise ImageError(f"media_proc_cfg.{spec.name}: must be positive, got {value!r}"[:200])
        for name in ("image_mean", "image_std"):
            colors = getattr(self, name)
            if len(colors) != 3 or not all(isinstance(c, int | float) and abs(c) <= _MOST for c in colors):
                raise ImageError(f"media_proc_cfg.{name}: expected one value per colour, got {list(colors)!r}"[:200])
        if self.merge_kernel_size != 2 or self.temporal_merge_kernel_size > 4:
            raise ImageError("media_proc_cfg: K3 merges 2x2 patches and at most 4 frames")
        if 0 in self.image_std:
            raise ImageError("media_proc_cfg.image_std: must not be zero")
        if max(self.chessboard_white_value, self.chessboard_gray_value) > 255:
            raise ImageError("media_proc_cfg: the chessboard's values must lie in 1..255")
        if self.patch_limit_on_one_side % 2:
            raise ImageError("media_proc_cfg.patch_limit_on_one_side: must be even, for patches merge 2x2")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MediaConfig:
        """Read a `media_proc_cfg`, or a whole preprocessor_config. Raises ImageError naming what K3 does not have."""
        data = _object(_object(data, "preprocessor_config").get("media_proc_cfg", data), "media_proc_cfg")
        board = data.get("transparent_bg_config") or _RELEASED["transparent_bg_config"]
        board = _object(board, "media_proc_cfg.transparent_bg_config")
        for name, value in _RELEASED.items():
            if name != "transparent_bg_config" and data.get(name, value) != value:
                raise ImageError(f"media_proc_cfg.{name}: {data[name]!r} is not supported (expected {value!r})")
        if board.get("pattern") != "chessboard" or board.get("chessboard_square_on_top_left") is not True:
            raise ImageError("media_proc_cfg.transparent_bg_config: expected a chessboard with a white first square")
        names = {spec.name for spec in dataclasses.fields(cls)}
        given = {name: value for name, value in {**data, **board}.items() if name in names}
        for name in ("image_mean", "image_std"):
            if name in given:
                colors = given[name]
                given[name] = tuple(colors) if isinstance(colors, list | tuple) else (colors,)
        return cls(**given)

    @classmethod
    def from_json(cls, path: str | Path) -> MediaConfig:
        """Read preprocessor_config.json, or the one inside a checkpoint directory."""
        path = Path(path)
        path = path / "preprocessor_config.json" if path.is_dir() else path
        try:
            return cls.from_dict(read_json(path))
        except FileNotFoundError:
            raise ImageError(f"{path}: no such file; expected a preprocessor_config.json") from None
        except JsonError as error:
            raise ImageError(str(error)) from None
        except ImageError as error:
            raise ImageError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The released preprocessor_config.json's shape; `from_dict(to_dict())` is the identity."""
        data = dataclasses.asdict(self)
        board = {name: data.pop(name) for name in list(data) if name.startswith("chessboard_")}
        board = {**_RELEASED["transparent_bg_config"], **board}
        media = {**data, **_RELEASED, "transparent_bg_config": board}
        return {"media_proc_cfg": {**media, "image_mean": list(self.image_mean), "image_std": list(self.image_std)}}


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ImageError(f"{name}: expected an object, got {value!r}"[:200])
    return value


_MOST = 2**40  # of any number in a configuration
_RELEASED: dict[str, Any] = {
    "fixed_output_tokens": None,
    "timestamp_mode": "hh:mm:ss.fff",
    "transparent_bg_fill_stage": "after_resize",
    "transparent_bg_config": {"pattern": "chessboard", "chessboard_square_on_top_left": True},
}


class Resize(NamedTuple):
    """Size after scaling, zeros added right and below, and tokens in the text."""

    new_width: int
    new_height: int
    pad_width: int
    pad_height: int
    num_tokens: int


class ImagePatches(NamedTuple):
    """A preprocessed image: pixels float32 [h*w, 3, 14, 14], grid (1, h, w) in patches, ORIGINAL (width, height)."""

    pixels: Pixels
    grid_thw: Grid
    size: tuple[int, int]

    @property
    def media(self) -> tuple[Pixels, Grid]:
        """What `Packed.join(images=...)` takes."""
        return self.pixels, self.grid_thw

    @property
    def prompt(self) -> str:
        """What stands for the image in the text."""
        return image_prompt(*self.size)

    @property
    def num_tokens(self) -> int:
        """Tokens it takes in the text once its placeholder is expanded."""
        return self.grid_thw[1] * self.grid_thw[2] // 4


def preprocess_image(source: Any, config: MediaConfig | None = None, *, max_tokens: int | None = None) -> ImagePatches:
    """A file name, bytes, binary file, PIL image or uint8 array [H, W(, 1 | 3 | 4)] to patches (report section 2.4).

    Orientation by EXIF, bicubic resize, transparency over a chessboard after it, zeros to a multiple of 28, then
    (x / 255 - mean) / std. Every way to give one picture gives one result. `max_tokens` is a limit of the caller's own:
    the released one is on patches before padding, so a thin picture may take more tokens. Raises ImageError naming the
    file.
    """
    config = config or MediaConfig()
    image, name = load_image(source, config)
    plan = plan_resize(image.width, image.height, config)
    limit = float(min(config.in_patch_limit, image.width * image.height))
    while max_tokens is not None and plan.num_tokens > max(1, max_tokens):
        limit *= max(1, max_tokens) / plan.num_tokens
        plan = plan_resize(image.width, image.height, config, limit)
    return ImagePatches(to_patches(image, plan, config), grid_of(plan, 1, config), image.size)


def plan_resize(width: int, height: int, config: MediaConfig, patch_limit: float | None = None) -> Resize:
    """Size within the patch limits (`patch_limit` in all, default `in_patch_limit`; and per side), then padding."""
    if width < 1 or height < 1:
        raise ImageError(f"image: {width}x{height} pixels; it is empty")
    patch = config.patch_size
    longest = config.patch_limit_on_one_side * patch
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt((patch_limit or config.in_patch_limit) / patches), longest / width, longest / height)
    new_width, new_height = (min(longest, max(1, int(side * scale))) for side in (width, height))
    unit = patch * config.merge_kernel_size
    pad_width, pad_height = -new_width % unit, -new_height % unit
    tokens = (new_width + pad_width) // unit * ((new_height + pad_height) // unit)
    return Resize(new_width, new_height, pad_width, pad_height, tokens)


def grid_of(plan: Resize, frames: int, config: MediaConfig) -> Grid:
    """(frames, rows, columns) of patches."""
    height, width = plan.new_height + plan.pad_height, plan.new_width + plan.pad_width
    return frames, height // config.patch_size, width // config.patch_size


def to_patches(image: Image.Image, plan: Resize, config: MediaConfig) -> Pixels:
    """Resize, lay over the background, pad, normalise and cut an RGB or RGBA image: float32 [patches, 3, P, P]."""
    size = (plan.new_width, plan.new_height)
    small = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(small)
    if small.mode == "RGBA":
        pixels = _over_chessboard(pixels, config)
    pixels = np.pad(pixels, ((0, plan.pad_height), (0, plan.pad_width), (0, 0)))
    patch = config.patch_size
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    cut = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)
    levels = (np.arange(256) / 255.0).astype(np.float32)
    patches = np.empty(cut.shape, np.float32)
    for channel in range(3):
        mean, std = np.float32(config.image_mean[channel]), np.float32(config.image_std[channel])
        patches[:, channel] = ((levels - mean) / std)[cut[:, channel]]
    return patches


def load_image(source: Any, config: MediaConfig | None = None) -> tuple[Image.Image, str]:
    """The upright picture in mode RGB, or RGBA if any of it can be transparent, and its name for messages."""
    config = config or MediaConfig()
    opened, name = open_image(source, config)
    try:
        opened.load()
        return to_color(ImageOps.exif_transpose(opened)), name
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None
    except Exception as error:  # decoders meet damaged files with almost any exception
        raise ImageError(f"{name}: damaged or not a picture ({_first_line(error)})") from None


def open_image(source: Any, config: MediaConfig) -> tuple[Image.Image, str]:
    """A picture whose header was read and found acceptable, and its name for messages."""
    name = str(source) if isinstance(source, (str, os.PathLike)) else "image"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # max_pixels decides
            image = _open(source)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None
    except FileNotFoundError:
        raise ImageError(f"{name}: no such file") from None
    except UnidentifiedImageError:
        raise ImageError(f"{name}: damaged or not a picture (no known format)") from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: too many pixels ({_first_line(error)})") from None
    except Exception as error:  # decoders meet damaged files with almost any exception
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise ImageError(f"{name}: damaged or not a picture ({reason})") from None
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"{name}: {width}x{height} pixels; the picture is empty")
    if width * height > config.max_pixels:
        raise ImageError(f"{name}: {width}x{height} pixels are more than {config.max_pixels}; make it smaller first")
    return image, name


def to_color(image: Image.Image) -> Image.Image:
    """Any mode to RGB, or to RGBA where something may be transparent."""
    if image.mode in _GREY16:
        return _from_grey16(image)
    if image.mode == "F":
        raise ImageError("32-bit float pixels have no fixed brightness; convert it to 8 bits first")
    if image.mode == "La":
        image = image.convert("LA")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _open(source: Any) -> Image.Image:
    if isinstance(source, Image.Image):
        color = _transparent_color(source)
        return _with_transparency(source.copy(), color)
    if isinstance(source, (bytes, bytearray, memoryview)):
        source = io.BytesIO(source)
    if isinstance(source, (str, os.PathLike)) and os.path.exists(source) and not os.path.isfile(source):
        raise ImageError("not an ordinary file")  # a pipe would wait for ever, and a device may never end
    if isinstance(source, (str, os.PathLike)) or hasattr(source, "read"):
        image = Image.open(source)
        return _with_transparency(image, _transparent_color(image))
    if hasattr(source, "__array__"):
        return _from_array(np.asarray(source))
    raise ImageError(f"expected a file, bytes, a PIL image or an array, got {type(source).__name__}")


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    grey16 = array.dtype == np.uint16 and array.ndim == 2
    color = array.ndim == 3 and array.shape[2] in (3, 4)
    if not grey16 and (array.dtype != np.uint8 or not (array.ndim == 2 or color)):
        raise ImageError(f"array {list(array.shape)} of {array.dtype}; expected uint8 [H, W], [H, W, 3] or [H, W, 4]")
    if 0 in array.shape:
        raise ImageError(f"array {list(array.shape)}; the picture is empty")
    return Image.fromarray(array)


def _transparent_color(image: Image.Image) -> Any:
    """A PNG names its transparent colour in the file's bit depth, Pillow compares it with 8-bit values.

    The depth is known only until the pixels are loaded: an image that was loaded before keeps the file's value.
    """
    color = image.info.get("transparency")
    tiles = getattr(image, "tile", None)
    scale = _PNG_SCALE.get(str(tiles[0][3])) if image.format == "PNG" and tiles else None
    if scale is None or color is None or isinstance(color, bytes):
        return color
    return tuple(int(value * scale) for value in color) if isinstance(color, tuple) else int(color * scale)


def _with_transparency(image: Image.Image, color: Any) -> Image.Image:
    if color is not None:
        image.info["transparency"] = color
    return image


def _from_grey16(image: Image.Image) -> Image.Image:
    """16-bit grey to its high byte, as other 16-bit pictures are read; Pillow's own conversion would clip."""
    values = np.asarray(image).astype(np.int64).clip(0, 65535)
    grey = (values >> 8).astype(np.uint8)
    color = image.info.get("transparency")
    if color is None:
        return Image.fromarray(grey).convert("RGB")
    alpha = np.where(values == color, 0, 255).astype(np.uint8)
    return Image.fromarray(np.stack([grey, grey, grey, alpha], axis=2))


def _over_chessboard(pixels: np.ndarray, config: MediaConfig) -> np.ndarray:
    """Blend RGBA uint8 [H, W, 4] over squares, white first; fp32, truncated, as the released processor does."""
    rows, columns = np.indices(pixels.shape[:2]) // config.chessboard_square_size
    board = np.where((rows + columns) % 2 == 0, config.chessboard_white_value, config.chessboard_gray_value)
    alpha = pixels[:, :, 3:].astype(np.float32) / np.float32(255)
    mixed = pixels[:, :, :3].astype(np.float32) * alpha + board[:, :, None].astype(np.float32) * (1 - alpha)
    return mixed.astype(np.uint8)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
