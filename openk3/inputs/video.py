"""Video: sampled frames in chunks of at most four, each chunk one item of patches with the time it starts at.

The last chunk is short when the number of frames is no multiple of four: the tower takes 1 to 4 frames and pools them
by their mean, so a chunk costs the same tokens however many frames it has, and repeated frames would only shift that
mean.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from openk3.inputs.images import (
    Grid,
    ImageError,
    MediaConfig,
    Pixels,
    Resize,
    grid_of,
    load_image,
    open_image,
    plan_resize,
    to_color,
    to_patches,
)
from openk3.inputs.xtml import video_prompt

MAX_FRAMES = 100_000  # of the file, before sampling
_NO_DURATION = 0.1  # seconds a frame is shown when its file does not say
_PICTURES = {".gif", ".png", ".apng", ".webp", ".avif", ".tif", ".tiff", ".mpo"}
_ONE_PICTURE = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)

Read = Callable[[Sequence[int]], Iterator[Image.Image]]


class VideoPlan(NamedTuple):
    """What a video becomes: frames to take, the size of each, chunk grids (t, h, w), start times, tokens in all."""

    frames: tuple[int, ...]
    resize: Resize
    grids: tuple[Grid, ...]
    timestamps: tuple[str, ...]
    num_tokens: int


@dataclass(frozen=True)
class Video:
    """A preprocessed video: `chunks` of (pixels float32 [t*h*w, 3, 14, 14], (t, h, w)) and when each starts."""

    chunks: tuple[tuple[Pixels, Grid], ...]
    timestamps: tuple[str, ...]
    num_tokens: int

    @property
    def prompt(self) -> str:
        """What stands for the video in the text: one placeholder per chunk."""
        return video_prompt(self.timestamps)


def preprocess_video(source: Any, config: MediaConfig | None = None, *, fps: float | None = None) -> Video:
    """Frames to chunks of patches.

    `source` is a list of pictures (anything `preprocess_image` takes, all of one size) or an array
    [frames, H, W, C], at `fps` frames per second (default: the sampling rate, so that all are taken); or an animated
    GIF, PNG or WebP; or a film, if the `video` extra is installed. Raises ImageError naming the file or frame.
    """
    config = config or MediaConfig()
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix.lower() not in _PICTURES:
        times, size, read = _film(Path(source), config)
    elif isinstance(source, _ONE_PICTURE) or hasattr(source, "read"):
        times, size, read = _animation(source, config)
    else:
        times, size, read = _listed(source, config.sample_fps if fps is None else fps, config)
    plan = plan_video(times, *size, config)
    chunks: list[tuple[Pixels, Grid]] = []
    patches: list[Pixels] = []
    for image in read(plan.frames):
        patches.append(to_patches(image, plan.resize, config))
        if len(patches) == plan.grids[len(chunks)][0]:
            chunks.append((np.concatenate(patches), plan.grids[len(chunks)]))
            patches = []
    if len(chunks) != len(plan.grids):
        raise ImageError("video: the file lost frames while it was read")
    return Video(tuple(chunks), plan.timestamps, plan.num_tokens)


def plan_video(times: Sequence[float], width: int, height: int, config: MediaConfig) -> VideoPlan:
    """Choose frames and sizes without decoding; `times` are the seconds at which each frame starts, and the end.

    Frames are spread evenly so that at most `sample_fps` remain per second; the patch limit of a frame is what the
    whole video's limit leaves it. The plan's tokens are exactly those of the preprocessed video.
    """
    total, end = len(times) - 1, times[-1]
    if total < 1:
        raise ImageError("video: it has no frames")
    if total > MAX_FRAMES:
        raise ImageError(f"video: {total} frames; at most {MAX_FRAMES} can be read")
    if end >= 100 * 3600:
        raise ImageError("video: longer than 100 hours; timestamps have two digits for hours")
    if not end > 0:
        raise ImageError("video: its frames have no duration")
    rate = total / end
    count = min(total, max(1, round(total * min(config.sample_fps, rate) / rate)))
    frames = tuple(int(i) for i in np.linspace(0, total - 1, count).round())
    limit = min(config.in_patch_limit_each_frame, max(1, round(config.in_patch_limit_video / count)))
    resize = plan_resize(width, height, config, limit)
    size = config.temporal_merge_kernel_size
    starts = range(0, count, size)
    grids = tuple(grid_of(resize, min(size, count - start), config) for start in starts)
    timestamps = tuple(timestamp(times[frames[start]]) for start in starts)
    return VideoPlan(frames, resize, grids, timestamps, len(grids) * resize.num_tokens)


def timestamp(seconds: float) -> str:
    """hh:mm:ss.fff, cut to the millisecond."""
    milliseconds = math.floor(round(seconds * 1000, 3))
    whole, part = divmod(milliseconds, 1000)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{part:03d}"


def _listed(source: Any, fps: float, config: MediaConfig) -> tuple[list[float], tuple[int, int], Read]:
    if not fps > 0 or math.isinf(fps):
        raise ImageError(f"video: fps must be a positive number, got {fps!r}")
    if isinstance(source, np.ndarray) and source.ndim != 4:
        raise ImageError(f"video: array {list(source.shape)}; expected [frames, height, width, colours]")
    try:
        pictures = list(source)
    except TypeError:
        raise ImageError(f"video: expected a file or a list of frames, got {type(source).__name__}") from None
    if not pictures:
        raise ImageError("video: it has no frames")

    def load(index: int) -> Image.Image:
        try:
            return load_image(pictures[index], config)[0]
        except ImageError as error:
            raise ImageError(f"video frame {index}: {error}") from None

    size = load(0).size

    def read(frames: Sequence[int]) -> Iterator[Image.Image]:
        for index in frames:
            image = load(index)
            if image.size != size:
                found, first = "x".join(map(str, image.size)), "x".join(map(str, size))
                raise ImageError(f"video frame {index}: {found} pixels, but the first frame has {first}")
            yield image

    return [index / fps for index in range(len(pictures) + 1)], size, read


def _animation(source: Any, config: MediaConfig) -> tuple[list[float], tuple[int, int], Read]:
    image, name = (source, "image") if isinstance(source, Image.Image) else open_image(source, config)
    start = image.tell()
    total = getattr(image, "n_frames", 1)
    if total > MAX_FRAMES:
        raise ImageError(f"{name}: {total} frames; at most {MAX_FRAMES} can be read")

    def go_to(index: int) -> None:
        try:
            image.seek(index)
            image.load()
        except Exception as error:  # decoders meet damaged files with almost any exception
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ImageError(f"{name}: frame {index} is damaged ({reason})") from None

    times = [0.0]
    for index in range(total):
        go_to(index)
        times.append(times[-1] + (image.info.get("duration") or 1000 * _NO_DURATION) / 1000)

    def read(frames: Sequence[int]) -> Iterator[Image.Image]:
        for index in frames:
            go_to(index)
            try:
                yield to_color(image.copy())
            except ImageError as error:
                raise ImageError(f"{name}: {error}") from None
        go_to(start)

    return times, image.size, read


def _film(path: Path, config: MediaConfig) -> tuple[list[float], tuple[int, int], Read]:
    try:
        av = importlib.import_module("av")
    except ImportError:
        known = ", ".join(sorted(_PICTURES))
        raise ImageError(f"{path}: films need PyAV (pip install av); without it: {known}") from None
    times: list[float] = []
    size = (0, 0)
    step = 1 / config.sample_fps
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            step = float(1 / stream.average_rate) if stream.average_rate else step
            for frame in container.decode(stream):
                times.append(frame.time if frame.time is not None else len(times) * step)
                size = (frame.height, frame.width) if frame.rotation % 180 == 90 else (frame.width, frame.height)
                if len(times) > MAX_FRAMES:
                    break
    except (av.error.FFmpegError, IndexError, OSError) as error:
        raise ImageError(f"{path}: cannot be read as a film ({error})") from None
    if size[0] * size[1] > config.max_pixels:
        raise ImageError(f"{path}: {size[0]}x{size[1]} pixels are more than {config.max_pixels}")

    def read(frames: Sequence[int]) -> Iterator[Image.Image]:
        wanted = set(frames)
        with av.open(str(path)) as container:
            for index, frame in enumerate(container.decode(video=0)):
                if index in wanted:
                    yield frame.to_image().rotate(frame.rotation, expand=True)  # both count counterclockwise

    first = times[0] if times else 0.0
    times = [time - first for time in times]
    return [*times, times[-1] + step if times else 0.0], size, read
