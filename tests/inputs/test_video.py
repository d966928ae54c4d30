"""Video: frame counts, chunks, times, limits, animated files, films, and frames that do not fit."""

import dataclasses
import io
import sys
import types
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from openk3.inputs.chat import encode_chat, parse, render
from openk3.inputs.images import ImageError, MediaConfig, preprocess_image
from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.video import plan_video, preprocess_video, timestamp

CONFIG = MediaConfig()
TOKENIZER = Tokenizer({bytes([b]): b for b in range(256)})


def frame(value, height=28, width=56):
    return np.full((height, width, 3), value, np.uint8)


def uniform(count, fps):
    return [index / fps for index in range(count + 1)]


def animation(values, kind="GIF", duration=125, **options):
    frames = [Image.fromarray(frame(value)) for value in values]
    options |= {"save_all": True, "append_images": frames[1:], "duration": duration}
    frames[0].save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 18])
def test_frame_counts(count, group):
    """V04: slots are ceil(n/g)*g (for 4: 4, 4, 4, 4, 8, 20, 20), every frame is kept, the estimate is exact."""
    config = dataclasses.replace(CONFIG, temporal_merge_kernel_size=group)
    video = preprocess_video([frame(n) for n in range(count)], config)
    slots = {2: [2, 2, 4, 4, 6, 18, 18], 4: [4, 4, 4, 4, 8, 20, 20]}[group][[1, 2, 3, 4, 5, 17, 18].index(count)]
    assert len(video.chunks) * group == slots and sum(grid[0] for _, grid in video.chunks) == count
    assert [grid[0] for _, grid in video.chunks[:-1]] == [group] * (len(video.chunks) - 1)
    shown = [level for pixels, _ in video.chunks for level in pixels.reshape(-1, 8 * 3 * 14 * 14)[:, 0]]
    assert np.array_equal(np.rint((np.array(shown) * 0.5 + 0.5) * 255), np.arange(count))
    plan = plan_video(uniform(count, config.sample_fps), 56, 28, config)
    assert plan.num_tokens == video.num_tokens == 2 * slots // group and plan.timestamps == video.timestamps
    assert plan.grids == tuple(grid for _, grid in video.chunks)


def test_estimate_equals_the_tokens_of_the_prompt():
    """V04: two images and a video: the plans' tokens are the placeholders of the expanded prompt."""
    video = preprocess_video([frame(n) for n in range(18)])
    images = [preprocess_image(frame(n, 60, 90)) for n in (3, 4)]
    parts = [{"type": "image"}, {"type": "text", "text": "then"}, {"type": "video"}, {"type": "image"}]
    prompts = [images[0].prompt, video.prompt, images[1].prompt]
    ids, _ = encode_chat(TOKENIZER, render([{"role": "user", "content": parts}], image_prompts=prompts))
    media = [images[0].media, *video.chunks, images[1].media]
    pad = TOKENIZER.special["<|media_pad|>"]
    packed = Packed.join([ids], media).expand(pad)
    assert int((packed.token_ids_T == pad).sum()) == video.num_tokens + sum(image.num_tokens for image in images)
    content = parse(packed.token_ids_T.tolist(), tokenizer=TOKENIZER).messages[0]["content"]
    assert content[2] == {"type": "video", "timestamps": list(video.timestamps)}


def test_media_do_not_touch_each_other():
    """V04: one changed pixel in one picture changes nothing else, and order is only order."""
    frames = [frame(n) for n in range(6)]
    before = preprocess_video(frames)
    frames[5] = frames[5].copy()
    frames[5][3, 3] = 255
    after = preprocess_video(frames)
    assert np.array_equal(before.chunks[0][0], after.chunks[0][0])
    assert (before.chunks[1][0] != after.chunks[1][0]).sum() == 3
    turned = preprocess_video(frames[::-1])
    assert np.array_equal(turned.chunks[0][0][:8], after.chunks[1][0][8:])


def test_a_frame_is_preprocessed_as_an_image():
    video = preprocess_video([frame(7, 50, 70)])
    image = preprocess_image(frame(7, 50, 70))
    assert video.chunks[0][1] == image.grid_thw and np.array_equal(video.chunks[0][0], image.pixels)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "00:00:00.000"),
        (0.125, "00:00:00.125"),
        (2.9, "00:00:02.900"),
        (59.9999, "00:00:59.999"),
        (60, "00:01:00.000"),
        (3661.0005, "01:01:01.000"),
        (359999.999, "99:59:59.999"),
        (1 / 3, "00:00:00.333"),
    ],
)
def test_timestamps(seconds, text):
    assert timestamp(seconds) == text


def test_chunk_times_and_prompt():
    video = preprocess_video([frame(n) for n in range(9)], fps=8)
    assert video.timestamps == ("00:00:00.000", "00:00:00.500", "00:00:01.000")
    piece = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    assert video.prompt == f"00:00:00.000{piece}00:00:00.500{piece}00:00:01.000{piece}"


def test_faster_films_are_sampled_down_and_slower_ones_kept():
    fast = plan_video(uniform(60, 30), 56, 28, CONFIG)
    assert len(fast.frames) == 16 and fast.frames[0] == 0 and fast.frames[-1] == 59
    assert fast.timestamps == tuple(timestamp(fast.frames[n] / 30) for n in (0, 4, 8, 12))
    slow = plan_video(uniform(6, 2), 56, 28, CONFIG)
    assert slow.frames == tuple(range(6)) and slow.timestamps == ("00:00:00.000", "00:00:02.000")
    still = plan_video([0.0, 1e-9], 56, 28, CONFIG)
    assert still.frames == (0,) and still.num_tokens == 2


@pytest.mark.parametrize(
    ("count", "limit"),
    [(1, 16384), (40, 16384), (41, round(655360 / 41)), (400, 1638), (4000, 164)],
)
def test_the_video_limit_is_shared_by_its_frames(count, limit):
    """A frame takes at most 16384 patches, all frames together 655360."""
    plan = plan_video(uniform(count, 8), 1792, 1792, CONFIG)
    one = plan_video([0.0, 1.0], 1792, 1792, dataclasses.replace(CONFIG, in_patch_limit_each_frame=limit))
    assert plan.resize == one.resize and len(plan.frames) == count
    patches = plan.resize.new_width // 14 * (plan.resize.new_height // 14)
    assert patches <= limit and patches * count <= 655360 * 1.01


@given(st.integers(1, 300), st.floats(0.5, 120), st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_plans_are_consistent(count, fps, width, height, group):
    config = dataclasses.replace(CONFIG, temporal_merge_kernel_size=group)
    plan = plan_video(uniform(count, fps), width, height, config)
    assert list(plan.frames) == sorted(set(plan.frames)) and plan.frames[0] >= 0 and plan.frames[-1] < count
    assert len(plan.frames) <= max(1, round(count * min(1, 8 / fps)) + 1)
    assert sum(grid[0] for grid in plan.grids) == len(plan.frames)
    assert len(plan.timestamps) == len(plan.grids) == -(-len(plan.frames) // group)
    assert all(early < late for early, late in pairwise(plan.timestamps))
    assert plan.num_tokens == sum(grid[1] * grid[2] // 4 for grid in plan.grids)


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_animated_files_by_every_way(kind, options, tmp_path):
    """V01, V04: a file, its bytes, an open file and a PIL image give one video, the one its frames give."""
    values = [0, 60, 120, 180, 240]
    data = animation(values, kind, duration=200, **options)
    path = tmp_path / f"film.{kind.lower()}"
    path.write_bytes(data)
    opened = Image.open(io.BytesIO(data))
    want = preprocess_video([frame(value) for value in values], fps=5)
    assert want.timestamps == ("00:00:00.000", "00:00:00.800")
    for source in (path, str(path), data, io.BytesIO(data), opened, opened):
        got = preprocess_video(source)
        assert got.timestamps == want.timestamps and got.num_tokens == want.num_tokens
        for (pixels, grid), (wanted, wanted_grid) in zip(got.chunks, want.chunks, strict=True):
            assert grid == wanted_grid and np.array_equal(pixels, wanted)
    assert opened.tell() == 0


def test_frame_durations_give_the_times():
    times = [2000, 10, 10, 10, 3000, 10]
    got = preprocess_video(animation(range(0, 240, 40), duration=times))
    assert got.timestamps == ("00:00:00.000", "00:00:02.030")
    silent = preprocess_video(animation([0, 100], duration=0))
    assert [grid[0] for _, grid in silent.chunks] == [2] and silent.timestamps == ("00:00:00.000",)


def test_still_pictures_are_one_frame():
    buffer = io.BytesIO()
    Image.fromarray(frame(9)).save(buffer, "PNG")
    assert [grid for _, grid in preprocess_video(buffer.getvalue()).chunks] == [(1, 2, 4)]


def test_lists_of_any_pictures(tmp_path):
    Image.fromarray(frame(5)).save(tmp_path / "a.png")
    mixed = [tmp_path / "a.png", frame(6), Image.fromarray(frame(7)), (tmp_path / "a.png").read_bytes()]
    stacked = np.stack([frame(5), frame(6), frame(7), frame(5)])
    first, second = preprocess_video(mixed), preprocess_video(stacked)
    assert np.array_equal(first.chunks[0][0], second.chunks[0][0])


@pytest.mark.parametrize(
    ("source", "given", "words"),
    [
        ([], {}, "video: it has no frames"),
        (np.zeros((0, 4, 4, 3), np.uint8), {}, "video: it has no frames"),
        (np.zeros((4, 4, 3), np.uint8), {}, r"video: array \[4, 4, 3\]; expected \[frames, height, width, colours\]"),
        (7, {}, "video: expected a file or a list of frames, got int"),
        ([frame(1), frame(1, 30)], {}, "video frame 1: 56x30 pixels, but the first frame has 56x28"),
        ([frame(1), b"x"], {}, "video frame 1: image: damaged"),
        ([b""], {}, "video frame 0: image: damaged"),
        ([frame(1)], {"fps": 0}, "fps must be a positive number, got 0"),
        ([frame(1)], {"fps": float("nan")}, "fps must be a positive number"),
        ([frame(1)] * 2, {"fps": 1e-6}, "longer than 100 hours"),
        (b"hello", {}, "image: damaged"),
        (animation([1, 2, 3])[:-40], {}, "image: frame . is damaged"),
        ("nothing.gif", {}, "nothing.gif: no such file"),
    ],
)
def test_unusable_videos_are_one_clear_line(source, given, words):
    with pytest.raises(ImageError, match=words) as error:
        preprocess_video(source, **given)
    assert "\n" not in str(error.value)


def test_too_many_frames_are_refused():
    with pytest.raises(ImageError, match="video: 100001 frames; at most 100000"):
        plan_video(uniform(100_001, 8), 28, 28, CONFIG)
    with pytest.raises(ImageError, match="no duration"):
        plan_video([0.0, 0.0], 28, 28, CONFIG)


def test_films_without_the_extra_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImageError, match=r"film.mp4: films need PyAV \(pip install av\)"):
        preprocess_video(tmp_path / "film.mp4")


class Film:
    """Stands in for PyAV: frames with a time, one picture each."""

    def __init__(self, times, rate=30, rotation=0):
        self.times, self.average_rate, self.rotation = times, rate, rotation
        self.streams = types.SimpleNamespace(video=[self])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def decode(self, *stream, video=None):
        for n, time in enumerate(self.times):
            picture = Image.fromarray(frame(n))
            picture.putpixel((0, 0), (255, 255, 255))
            given = {"time": time, "width": 56, "height": 28, "rotation": self.rotation}
            yield types.SimpleNamespace(to_image=lambda picture=picture: picture, **given)


class FilmError(Exception):
    pass


def use_film(monkeypatch, film):
    def open_film(path):
        if film is None:
            raise FilmError("Invalid data found")
        return film

    error = types.SimpleNamespace(FFmpegError=FilmError)
    monkeypatch.setitem(sys.modules, "av", types.SimpleNamespace(open=open_film, error=error))


@pytest.mark.parametrize("offset", [0.0, 5.0, None])
def test_films_are_sampled_by_their_times(offset, monkeypatch):
    """30 frames in one second at 30 per second: 8 of them, in two chunks; times count from the first frame."""
    times = [None if offset is None else offset + n / 30 for n in range(30)]
    use_film(monkeypatch, Film(times))
    video = preprocess_video("film.mp4")
    shown = [level for pixels, _ in video.chunks for level in pixels.reshape(-1, 8 * 3 * 14 * 14)[:, -1]]
    frames = np.linspace(0, 29, 8).round()
    assert np.array_equal(np.rint((np.array(shown) * 0.5 + 0.5) * 255), frames)
    assert video.timestamps == ("00:00:00.000", timestamp(frames[4] / 30))


@pytest.mark.parametrize(("rotation", "grid", "corner"), [(0, (1, 2, 4), 0), (-90, (1, 4, 2), 1), (90, (1, 4, 2), 6)])
def test_films_are_turned_upright(rotation, grid, corner, monkeypatch):
    """V01: a phone's film is stored sideways with an angle, counterclockwise; its white corner must turn along."""
    use_film(monkeypatch, Film([0.0], rotation=rotation))
    ((pixels, found),) = preprocess_video("film.mp4").chunks
    assert found == grid and [n for n in range(8) if (pixels[n] == 1).any()] == [corner]


@pytest.mark.parametrize(("film", "words"), [(None, "cannot be read as a film"), (Film([]), "no frames")])
def test_unusable_films_are_one_clear_line(film, words, monkeypatch):
    use_film(monkeypatch, film)
    with pytest.raises(ImageError, match=words):
        preprocess_video("film.mp4")
