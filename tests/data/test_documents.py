"""Records to Documents: texts, conversations, captioned images, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from openk3.config.model import VisionConfig
from openk3.data.documents import DataError, Document, Encoder, Record, check_record, image_tokens, record_texts
from openk3.inputs.tokenizer import Tokenizer

TOKENIZER = Tokenizer({bytes([b]): b for b in range(256)})
BOS, EOS, PAD = (TOKENIZER.special[name] for name in ("[BOS]", "[EOS]", "<|media_pad|>"))


def encoder(**options: Any) -> Encoder:
    """An Encoder that takes images."""
    return Encoder(TOKENIZER, vision=VisionConfig(), **options)


def encode(fields: Any, **options: Any) -> Document:
    """One record's Document."""
    return encoder(**options).encode(Record(fields, "notes.jsonl:3"))


def picture(width: int = 56, height: int = 28) -> Image.Image:
    """A small grey picture."""
    return Image.new("RGB", (width, height), (90, 120, 200))


def test_text() -> None:
    """BOS, the bytes, EOS; all but BOS are targets; control token names in text stay text."""
    document = encode({"text": "hi <|open|>"})
    assert document.ids.tolist() == [BOS, *b"hi <|open|>", EOS]
    assert document.targets.tolist() == [False] + [True] * 12 and document.ids.dtype == np.int32


def test_conversation_has_loss_on_the_assistant_alone() -> None:
    """What the target tokens spell is the assistant's turn after its header."""
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    document = encode({"messages": messages, "thinking": False})
    spoken = TOKENIZER.decode(document.ids[document.targets].tolist())
    assert spoken == "<|open|>response<|sep|>4<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert "2+2?" in TOKENIZER.decode(document.ids.tolist())


@pytest.mark.parametrize("form", ["pil", "bytes", "array", "path"])
def test_captioned_image(form: str, tmp_path: Path) -> None:
    """BOS, the image's prompt with its original size, the prompt, then the caption with loss; any form of picture."""
    image = picture()
    image.save(tmp_path / "a.png")
    given: Any = {
        "pil": image,
        "bytes": (tmp_path / "a.png").read_bytes(),
        "array": np.asarray(image),
        "path": "a.png",
    }[form]
    fields = {"image": given, "prompt": "What?", "text": "blue"}
    document = encoder().encode(Record(fields, "x", tmp_path))
    text = TOKENIZER.decode(document.ids.tolist())
    start = "<|media_begin|>image 56x28<|media_content|><|media_pad|><|media_end|>"
    assert text == f"[BOS]{start}What?blue[EOS]"
    assert TOKENIZER.decode(document.ids[document.targets].tolist()) == "blue[EOS]"
    (pixels, grid), (block,) = document.images[0], document.blocks
    assert grid == (1, 2, 4) and pixels.shape == (8, 3, 14, 14) and image_tokens(grid) == 2
    assert document.ids[block.placeholder] == PAD
    assert TOKENIZER.decode(document.ids[block.start : block.stop].tolist()) == start
    assert document.expanded[-1] == len(document) + 1
    inside = set(range(block.start + 1, block.stop))
    assert set(document.ends.tolist()) == set(range(1, len(document) + 1)) - inside


def test_images_in_a_conversation() -> None:
    """Image parts may hold their picture; the loss is still the assistant's, and sizes come from the pictures."""
    content = [{"type": "image", "image": picture()}, {"type": "text", "text": "Name it"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "sky"}]
    document = encode({"messages": messages})
    assert len(document.images) == 1 and "image 56x28" in TOKENIZER.decode(document.ids.tolist())
    assert PAD not in document.ids[document.targets]


def test_two_images_and_a_limit() -> None:
    """Large pictures are scaled down to the limit; the text still names their true size."""
    document = encode({"image": [picture(), picture(1400, 1400)], "text": "two"}, max_image_tokens=16)
    assert len(document.blocks) == len(document.images) == 2
    assert image_tokens(document.images[1][1]) <= 16 and "image 1400x1400" in TOKENIZER.decode(document.ids.tolist())


BROKEN = [
    ([1], "expected an object"),
    ({"body": "x"}, r"no 'text', 'messages' or 'image' among its fields \['body'\]"),
    ({"text": 3}, "'text' must be a string"),
    ({"text": "x", "prompt": 1}, "'prompt' must be a string"),
    ({"messages": []}, "'messages' must be a non-empty list"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\]: role 'wizard'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ({"image": "gone.png", "text": "x"}, "gone.png"),
    ({"image": b"not a picture", "text": "x"}, "image"),
    ({"image": [], "text": 3}, "'text' must be a string"),
]
CHAT = {"role": "assistant", "content": "x"}
PART = {"type": "image", "image": b"pixels come later"}
# What a line may hold beside: found when the files are read, before training starts.
BROKEN_LINES = [
    ({"image": [], "text": "x"}, "'image' is an empty list"),
    ({"image": None, "text": "x"}, "an image is a path or a data URI, got NoneType"),
    ({"image": {"url": "x"}, "text": "x"}, "an image is a path or a data URI, got dict"),
    ({"image": [["a.png"]], "text": "x"}, "an image is a path or a data URI, got list"),
    ({"image": "gone.png", "text": "x"}, "gone.png: no such file"),
    ({"image": ".", "text": "x"}, "no such file"),
    ({"image": "a\0b", "text": "x"}, "no such file"),
    ({"image": "a" * 5000, "text": "x"}, "no such file"),
    ({"messages": [CHAT], "images": "a.png"}, "'images' must be a list"),
    ({"messages": [CHAT], "images": ["a.png"]}, "1 images for 0 image parts"),
    ({"messages": [CHAT | {"content": [{"type": "image_url", "image_url": "x"}]}]}, "0 images for 1 image parts"),
    ({"messages": [CHAT | {"content": [PART | {"size": [3, 3]}]}]}, "has a 'size'; leave it out"),
    ({"messages": [CHAT | {"content": [{"type": "video", "timestamps": 5}]}]}, "has a video part"),
    ({"messages": [CHAT], "thinking": "yes"}, "'thinking' must be true or false, got 'yes'"),
    ({"messages": [CHAT], "effort": "huge"}, "effort: 'huge' is not supported"),
    ({"messages": [CHAT], "tools": "x"}, "tools: expected a list"),
    ({"messages": [CHAT | {"name": 5}]}, r"messages\[0\]\.name: expected text, got int"),
    ({"messages": [1]}, r"messages\[0\]: int; expected an object"),
    ({"messages": [CHAT | {"tool_calls": 5}]}, "tool_calls: expected a list"),
]


@pytest.mark.parametrize(("fields", "message"), BROKEN_LINES + BROKEN[:6])
def test_broken_lines_are_found_without_encoding(fields: Any, message: str, tmp_path: Path) -> None:
    """The same line that would stop a run hours later."""
    with pytest.raises(DataError, match=rf"^notes\.jsonl:3: .*{message}") as caught:
        check_record(Record(fields, "notes.jsonl:3", tmp_path))
    assert "\n" not in str(caught.value)


def test_sound_lines_pass(tmp_path: Path) -> None:
    """Each kind, images by path, bytes and data URI; pixels are looked at later."""
    (tmp_path / "a.png").write_bytes(b"not looked at")
    for fields in (
        {"text": ""},
        {"image": "a.png", "text": "x", "prompt": None},
        {"image": [b"x", "data:image/png;base64,x", tmp_path / "a.png", picture()], "text": "x"},
        {"messages": [CHAT | {"content": [PART]}], "thinking": False, "effort": None, "tools": []},
        {"messages": [CHAT | {"content": [{"type": "image"}]}], "images": ["a.png"]},
    ):
        check_record(Record(fields, "x", tmp_path))


@pytest.mark.parametrize(("fields", "message"), BROKEN)
def test_broken_records_name_their_place(fields: Any, message: str) -> None:
    """One line that starts with the file and line and says what is wrong."""
    with pytest.raises(DataError, match=rf"^notes\.jsonl:3: .*{message}") as caught:
        encode(fields)
    assert "\n" not in str(caught.value)


def test_images_need_a_vision_model() -> None:
    """A text-only model refuses pictures instead of dropping them."""
    buffer = io.BytesIO()
    picture().save(buffer, "PNG")
    with pytest.raises(DataError, match="no vision part"):
        Encoder(TOKENIZER).encode(Record({"image": buffer.getvalue(), "text": "x"}, "x"))


def test_texts_for_the_tokenizer() -> None:
    """Prompt, text, and each message's words."""
    parts = [{"type": "text", "text": "b"}, {"type": "image", "image": "p.png"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}, {"role": "user"}]
    assert list(record_texts(Record({"messages": messages}, ""))) == ["b", "c"]
    assert list(record_texts(Record({"image": "p.png", "prompt": "d", "text": "e"}, ""))) == ["d", "e"]
