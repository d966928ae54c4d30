"""Images: released geometry and pixels, orientation, odd modes, damaged and oversized files."""

import dataclasses
import io
import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from openk3.inputs.images import ImageError, MediaConfig, plan_resize, preprocess_image
from openk3.inputs.packed import Packed

FOLDER = Path(__file__).parents[1] / "golden/preprocess"
META = json.loads((FOLDER / "meta.json").read_text())
RAW, EXPECTED = load_file(FOLDER / "images.safetensors"), load_file(FOLDER / "expected.safetensors")
CONFIG = MediaConfig()
BOARD = {"pattern": "chessboard", "chessboard_square_on_top_left": True}


def levels(pixels):
    """Back to 0..255."""
    return np.rint((pixels * 0.5 + 0.5) * 255).astype(np.uint8)


def picture(patches):
    """Patches of one image back to [H, W, 3] levels."""
    _, rows, columns = patches.grid_thw
    cut = levels(patches.pixels).reshape(rows, columns, 3, 14, 14)
    return cut.transpose(0, 3, 1, 4, 2).reshape(rows * 14, columns * 14, 3)


def encoded(image, kind="PNG", **options):
    image.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("name", META["cases"])
def test_released_processor_agrees(name):
    """Size, padding, tokens, grid, prompt and every pixel of the stored pictures."""
    case = META["cases"][name]
    config = dataclasses.replace(MediaConfig.from_dict(META), **case["overrides"])
    height, width = RAW[name].shape[:2]
    plan = plan_resize(width, height, config)
    assert {**plan._asdict(), "sampled_nframes": 1} == case["resize"]
    patches = preprocess_image(RAW[name], config)
    assert patches.pixels.dtype == np.float32 and patches.pixels.flags.c_contiguous
    assert [list(patches.grid_thw)] == EXPECTED[f"{name}.grid_thws"].tolist()
    assert patches.num_tokens == case["resize"]["num_tokens"] and patches.prompt == case["image_prompt"]
    assert np.array_equal(levels(patches.pixels), EXPECTED[f"{name}.pixel_u8"])
    if f"{name}.pixel_values" in EXPECTED:
        assert np.array_equal(patches.pixels, EXPECTED[f"{name}.pixel_values"])


@pytest.mark.parametrize(("width", "height", "want"), META["resize_table"])
def test_released_resize_table(width, height, want):
    assert {**plan_resize(width, height, CONFIG)._asdict(), "sampled_nframes": 1} == want


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(611, 437, 352), (224, 224, 64), (1920, 1080, 2691), (448, 448, 256), (2800, 2800, 10000)],
)
def test_published_token_counts(width, height, tokens):
    assert plan_resize(width, height, CONFIG).num_tokens == tokens


@given(
    st.integers(1, 40_000), st.integers(1, 40_000), st.sampled_from([4, 30, 16384, 65536]), st.sampled_from([2, 8, 512])
)
@settings(max_examples=200, deadline=None)
def test_sizes_stay_within_the_limits(width, height, limit, side):
    """Never enlarged, never over a side's limit, whole 28-pixel cells, the plan's tokens are the grid's."""
    config = dataclasses.replace(CONFIG, in_patch_limit=limit, patch_limit_on_one_side=side)
    plan = plan_resize(width, height, config)
    full_width, full_height = plan.new_width + plan.pad_width, plan.new_height + plan.pad_height
    assert 1 <= plan.new_width <= min(width, side * 14) and 1 <= plan.new_height <= min(height, side * 14)
    assert full_width % 28 == full_height % 28 == 0 and max(full_width, full_height) <= side * 14
    assert plan.num_tokens == full_width * full_height // 784
    if min(width, height) >= 14 and min(plan[:2]) > 1:  # the limit counts whole patches of the original
        assert plan.new_width * plan.new_height <= limit * (width / (width // 14)) * (height / (height // 14)) + 1e-6


def gradient():
    y, x = np.mgrid[:16, :24]
    return np.stack([x * 10, y * 15, (x + y) * 6], axis=2).astype(np.uint8)


TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


def every_way(data, tmp_path):
    """One picture file given as a name, a path, bytes, an open file, a memory file and a PIL image."""
    path = tmp_path / "picture"
    path.write_bytes(data)
    with path.open("rb") as file:
        sources = [str(path), path, data, bytearray(data), memoryview(data), io.BytesIO(data), file]
        return [preprocess_image(source) for source in [*sources, Image.open(io.BytesIO(data))]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation, tmp_path):
    """V01: pixels as a viewer shows them, size and tokens from the turned picture, one tensor for every path."""
    plain = encoded(Image.fromarray(gradient()), "JPEG", quality=95)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(gradient()), "JPEG", quality=95, exif=exif)
    upright = TURNS[orientation](np.asarray(Image.open(io.BytesIO(plain))))
    want = preprocess_image(np.ascontiguousarray(upright))
    for got in every_way(data, tmp_path):
        assert got.size == want.size == ((24, 16) if orientation < 5 else (16, 24))
        assert got.grid_thw == want.grid_thw and np.array_equal(got.pixels, want.pixels)


def chessboard(height, width):
    y, x = np.mgrid[:height, :width]
    return np.where((y // 8 + x // 8) % 2 == 0, 255, 180).astype(np.uint8)[:, :, None].repeat(3, axis=2)


def one_in_two(value, other, dtype=np.uint8, height=28, width=28):
    """Left half `value`, right half `other`."""
    out = np.full((height, width, *np.shape(value)), other, dtype)
    out[:, : width // 2] = value
    return out


def half_board(right):
    """Left half transparent over the board, right half a colour."""
    out = chessboard(28, 28)
    out[:, 14:] = right
    return out


def png(width, height, depth, color, rows, **chunks):
    """A PNG written by hand, for what Pillow does not write."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    out = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    for kind, data in chunks.items():
        out += chunk(kind.encode(), data)
    return out + chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))) + chunk(b"IEND", b"")


def odd_pictures():
    palette = Image.fromarray(one_in_two(0, 1), "P")
    palette.putpalette([0, 0, 0, 10, 20, 30])
    half_alpha = np.concatenate([one_in_two((9, 9, 9), (200, 100, 50)), one_in_two(0, 255)[:, :, None]], axis=2)
    la = np.stack([one_in_two(0, 77), one_in_two(0, 255)], axis=2)
    grey16 = one_in_two(0, 30000, np.uint16)
    high = one_in_two(1, 30000, np.uint16)
    full = (28, 28)
    yield "transparent black", encoded(Image.fromarray(np.zeros((28, 28, 4), np.uint8))), chessboard(28, 28)
    yield "half transparent", encoded(Image.fromarray(half_alpha)), half_board((200, 100, 50))
    yield "palette with colour", encoded(palette, transparency=0), half_board((10, 20, 30))
    yield "palette with alphas", encoded(palette, transparency=b"\x00\xff"), half_board((10, 20, 30))
    yield "gif with colour", encoded(palette, "GIF", transparency=0), half_board((10, 20, 30))
    yield "grey with colour", encoded(Image.fromarray(one_in_two(7, 77)), transparency=7), half_board(77)
    rgb = Image.fromarray(one_in_two((1, 2, 3), (4, 5, 6)))
    yield "rgb with colour", encoded(rgb, transparency=(1, 2, 3)), half_board((4, 5, 6))
    yield "grey and alpha", encoded(Image.fromarray(la)), half_board(77)
    yield "palette", encoded(palette), one_in_two((0, 0, 0), (10, 20, 30))
    yield "16-bit grey", encoded(Image.fromarray(grey16)), one_in_two((0, 0, 0), 30000 >> 8)
    yield "16-bit grey with colour", encoded(Image.fromarray(high), transparency=1), half_board(30000 >> 8)
    yield "16-bit grey tiff", encoded(Image.fromarray(grey16), "TIFF"), one_in_two((0, 0, 0), 30000 >> 8)
    pgm = b"P5 28 28 65535\n" + grey16.astype(">u2").tobytes()
    yield "16-bit grey pgm", pgm, one_in_two((0, 0, 0), 30000 >> 8)
    yield "1 bit", encoded(Image.fromarray(one_in_two(0, 255)).convert("1")), one_in_two((0, 0, 0), 255)
    bits = [b"\x00\x03\xff\xf0"] * 28
    yield "1 bit, white transparent", png(28, 28, 1, 0, bits, tRNS=b"\0\1"), None
    two = [bytes([0b01010101] * 3 + [0b01011010] + [0b10101010] * 3)] * 28
    yield "2-bit grey with colour", png(28, 28, 2, 0, two, tRNS=b"\0\1"), half_board(170)
    four = [bytes([0x33] * 7 + [0x55] * 7)] * 28
    yield "4-bit grey with colour", png(28, 28, 4, 0, four, tRNS=b"\0\3"), half_board(85)
    deep = [struct.pack(">3H", 0x0102, 0x0304, 0x0506) * 14 + struct.pack(">3H", 0x1112, 0x1314, 0x1516) * 14] * 28
    trns = struct.pack(">3H", 0x0102, 0x0304, 0x0506)
    yield "16-bit rgb with colour", png(28, 28, 16, 2, deep, tRNS=trns), half_board((0x11, 0x13, 0x15))
    cmyk = Image.new("CMYK", full, (255, 0, 0, 0))
    yield "cmyk tiff", encoded(cmyk, "TIFF"), np.full((28, 28, 3), (0, 255, 255), np.uint8)
    yield "lossless webp", encoded(Image.fromarray(half_alpha), "WEBP", lossless=True), half_board((200, 100, 50))
    yield "bmp", encoded(rgb, "BMP"), one_in_two((1, 2, 3), (4, 5, 6))


ODD = list(odd_pictures())


@pytest.mark.parametrize(("name", "data", "want"), ODD, ids=[name for name, _, _ in ODD])
def test_odd_modes(name, data, want, tmp_path):
    """V01: transparency over the chessboard, other modes as a viewer shows them, one tensor for every path."""
    if want is None:  # black where the bits are 0, the board where the white is transparent
        want = np.where(
            np.unpackbits(np.frombuffer(b"\x00\x03\xff\xf0", np.uint8))[:28, None] == 1, chessboard(28, 28), 0
        )
    results = every_way(data, tmp_path)
    for got in results:
        assert got.grid_thw == (1, 2, 2) and got.size == (28, 28)
        assert np.array_equal(picture(got), want), name


def test_cmyk_jpeg_is_read_in_colour():
    data = encoded(Image.new("CMYK", (28, 28), (255, 0, 0, 0)), "JPEG", quality=100)
    shown = picture(preprocess_image(data)).astype(int)
    assert np.abs(shown - (0, 255, 255)).max() <= 4


def test_transparency_is_blended_after_the_resize():
    """V01: the board keeps its 8-pixel squares however far the picture shrinks."""
    config = dataclasses.replace(CONFIG, in_patch_limit=4)
    assert np.array_equal(picture(preprocess_image(np.zeros((280, 280, 4), np.uint8), config)), chessboard(28, 28))


def test_arrays_equal_files():
    """V01: an array gives what its file gives."""
    color, grey = gradient(), gradient()[:, :, 0]
    alpha = np.dstack([color, grey])
    for array in (color, grey, alpha):
        want = preprocess_image(encoded(Image.fromarray(array)))
        assert np.array_equal(preprocess_image(array).pixels, want.pixels)
    assert np.array_equal(preprocess_image(grey[:, :, None]).pixels, preprocess_image(grey).pixels)
    assert np.array_equal(
        preprocess_image(grey > 90).pixels, preprocess_image((grey > 90).astype(np.uint8) * 255).pixels
    )
    deep = grey.astype(np.uint16) * 257
    assert np.array_equal(preprocess_image(deep).pixels, preprocess_image(grey).pixels)
    assert np.array_equal(preprocess_image(color[::2, ::-1]).pixels, preprocess_image(color[::2, ::-1].copy()).pixels)


def test_a_pil_image_is_left_as_it_was():
    image = Image.fromarray(gradient())
    image.info["transparency"] = (0, 0, 0)
    preprocess_image(image)
    assert image.mode == "RGB" and image.size == (24, 16) and image.info["transparency"] == (0, 0, 0)
    opened = Image.open(io.BytesIO(png(28, 28, 2, 0, [bytes([0b01010101] * 7)] * 28, tRNS=b"\0\1")))
    assert np.array_equal(picture(preprocess_image(opened)), chessboard(28, 28))
    assert opened.mode == "L" and opened.info["transparency"] == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (np.zeros((0, 5, 3), np.uint8), r"array \[0, 5, 3\]; the picture is empty"),
        (np.zeros((5, 5, 3), np.float32), "array .* of float32; expected uint8"),
        (np.zeros((5, 5, 2), np.uint8), r"array \[5, 5, 2\] of uint8; expected uint8"),
        (np.zeros(5, np.uint8), "expected uint8"),
        (np.zeros((2, 5, 5, 3), np.uint8), "expected uint8"),
        (Image.new("RGB", (0, 5)), "0x5 pixels; the picture is empty"),
        (Image.new("F", (5, 5)), "32-bit float pixels have no fixed brightness"),
        (7, "expected a file, bytes, a PIL image or an array, got int"),
        (None, "got NoneType"),
        (b"", "damaged or not a picture"),
        (b"hello", "damaged or not a picture"),
        (io.BytesIO(b"\x89PNG\r\n\x1a\n"), "damaged or not a picture"),
        (b"P6\n24 16\n2", r"damaged or not a picture \(not enough image data\)"),
        (encoded(Image.new("L", (99, 99)), "JPEG")[:-30], r"damaged or not a picture \(image file is truncated"),
    ],
)
def test_unusable_pictures_are_one_clear_line(source, words):
    with pytest.raises(ImageError, match=f"^image: .*{words}") as error:
        preprocess_image(source)
    assert "\n" not in str(error.value)


def test_files_are_named(tmp_path):
    good = encoded(Image.fromarray(gradient()))
    files = {"missing.png": None, "empty.png": b"", "text.jpg": b"hello", "cut.png": good[:60], "folder.png": "folder"}
    files["float.tiff"] = encoded(Image.new("F", (5, 5)), "TIFF")
    for name, data in files.items():
        path = tmp_path / name
        if data == "folder":
            path.mkdir()
        elif data is not None:
            path.write_bytes(data)
        for source in (path, str(path)):
            with pytest.raises(ImageError) as error:
                preprocess_image(source)
            assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_bombs_are_refused_before_they_unpack(recwarn):
    """A header that promises more pixels than the limit, and text that unpacks to megabytes."""
    for side in (14_000, 20_000, 60_000):
        bomb = png(side, side, 1, 0, [b"\0"])
        with pytest.raises(ImageError, match="pixels"):
            preprocess_image(bomb)
    with pytest.raises(ImageError, match=r"24x16 pixels are more than 100; make it smaller"):
        preprocess_image(gradient(), dataclasses.replace(CONFIG, max_pixels=100))
    text = png(1, 1, 8, 0, [b"\0"], zTXt=b"x\0\0" + zlib.compress(bytes(80_000_000), 9))
    with pytest.raises(ImageError, match="damaged"):
        preprocess_image(text)
    assert not recwarn.list


SMALL = [
    encoded(Image.fromarray(gradient()), kind)
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "ICO", "TGA")
]


@given(st.sampled_from(SMALL), st.data())
@settings(max_examples=250, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_never_raise_anything_else(data, draw):
    """Any bytes: a picture or one line."""
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(0, 4))):
        damaged[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    damaged = bytes(damaged)[: draw.draw(st.integers(0, len(data)))]
    try:
        patches = preprocess_image(damaged, dataclasses.replace(CONFIG, max_pixels=1_000_000))
    except ImageError as error:
        assert str(error).startswith("image: ") and "\n" not in str(error)
    else:
        assert patches.pixels.shape[0] == patches.grid_thw[1] * patches.grid_thw[2]


def test_thin_pictures_keep_one_pixel():
    patches = preprocess_image(np.full((1, 20_000, 3), 200, np.uint8))
    assert patches.grid_thw == (1, 2, 512) and patches.size == (20_000, 1)


def test_patches_go_into_a_batch():
    """The estimate in the plan, the expanded placeholders and the patches agree."""
    patches = preprocess_image(gradient())
    packed = Packed.join([[1, 9, 2]], [patches.media]).expand(9)
    assert packed.token_ids_T.tolist() == [1] + [9] * patches.num_tokens + [2]


def test_config_reads_and_writes_the_released_file(tmp_path):
    assert MediaConfig.from_dict(META) == CONFIG == MediaConfig.from_dict(CONFIG.to_dict())
    media = CONFIG.to_dict()["media_proc_cfg"]
    assert {name: media[name] for name in META["media_proc_cfg"]} == META["media_proc_cfg"]
    named = {"in_patch_limit_each_frame": 16384, "in_patch_limit_video": 655360, "sample_fps": 8.0}
    named |= {"temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff"}
    assert {name: media[name] for name in named} == named
    odd = dataclasses.replace(CONFIG, in_patch_limit=100, chessboard_square_size=3, image_std=(0.2, 0.3, 0.4))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(odd.to_dict()))
    assert MediaConfig.from_json(tmp_path) == odd == MediaConfig.from_json(tmp_path / "preprocessor_config.json")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens: 64 is not supported"),
        ({"timestamp_mode": "mm:ss"}, "timestamp_mode: 'mm:ss' is not supported"),
        ({"transparent_bg_fill_stage": "before_resize"}, "transparent_bg_fill_stage"),
        ({"transparent_bg_config": {"pattern": "white"}}, "transparent_bg_config: expected a chessboard"),
        ({"patch_size": 0}, "patch_size: must be positive, got 0"),
        ({"sample_fps": "8"}, "sample_fps: must be positive, got '8'"),
        ({"in_patch_limit": 6.5}, "in_patch_limit: must be positive"),
        ({"merge_kernel_size": 3}, "merges 2x2 patches"),
        ({"temporal_merge_kernel_size": 5}, "at most 4 frames"),
        ({"patch_limit_on_one_side": 7}, "must be even"),
        ({"image_mean": [0.5]}, "one value per colour"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std: must not be zero"),
        ({"image_mean": 5}, r"image_mean: expected one value per colour, got \[5\]"),
        ({"image_mean": ["a", "b", "c"]}, "image_mean: expected one value per colour"),
        ({"image_mean": [float("nan"), 0.5, 0.5]}, "image_mean: expected one value per colour"),
        ({"image_std": [float("inf"), 0.5, 0.5]}, "image_std: expected one value per colour"),
        ({"patch_size": 10**400}, "patch_size: must be positive, got 1000"),
        ({"transparent_bg_config": "x"}, "transparent_bg_config: expected an object, got 'x'"),
        ({"transparent_bg_config": {**BOARD, "chessboard_white_value": 256}}, r"values must lie in 1\.\.255"),
        (3, "media_proc_cfg: expected an object, got 3"),
    ],
)
def test_configs_that_are_not_k3_are_refused(data, words, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"media_proc_cfg": data}))
    with pytest.raises(ImageError, match=words) as error:
        MediaConfig.from_json(tmp_path / "p.json")
    assert str(tmp_path / "p.json") in str(error.value)


def test_missing_and_broken_config_files(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "preprocessor_config.json").mkdir()
    words = {
        "none": "no such file",
        "broken": "not valid JSON",
        "list": "expected an object",
        "deep": "nested too deeply",
    }
    for name, word in (words | {"preprocessor_config": "not an ordinary file"}).items():
        with pytest.raises(ImageError, match=rf"{name}\.json: .*{word}"):
            MediaConfig.from_json(tmp_path / f"{name}.json" if name in words else tmp_path)


def test_what_is_no_file_is_not_opened(tmp_path):
    """A pipe would wait for ever and a device never end."""
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", tmp_path, "/dev/zero"):
        with pytest.raises(ImageError, match=f"{path}: not an ordinary file"):
            preprocess_image(path)


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1), (55, 900), (1400, 1400), (13, 13), (56, 28), (4000, 83)])
@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_a_limit_on_tokens_holds_for_every_shape(size, most):
    """Padding makes thin pictures longer than the limit on patches says; the shape is kept as far as it can be."""
    config = dataclasses.replace(CONFIG, in_patch_limit=4 * most)
    free, held = (preprocess_image(Image.new("RGB", size), config, max_tokens=n) for n in (None, most))
    assert 1 <= held.num_tokens <= most and held.size == size
    assert held.grid_thw == free.grid_thw if free.num_tokens <= most else held.num_tokens < free.num_tokens


def test_other_means_and_deviations():
    config = dataclasses.replace(CONFIG, image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 0.25, 2.0))
    values = preprocess_image(np.full((28, 28, 3), (51, 102, 255), np.uint8), config).pixels[0, :, 0, 0]
    assert np.allclose(values, [(0.2 - 0.1) / 0.5, (0.4 - 0.2) / 0.25, (1 - 0.3) / 2], atol=1e-6)
