"""Document: tokens, which of them are targets, and images; made from text, conversation and captioned-image records."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openk3.config.model import ConfigError, VisionConfig
from openk3.inputs.chat import ChatError, Segment, encode_chat, image_prompt, render
from openk3.inputs.images import ImageError, MediaConfig, preprocess_image
from openk3.inputs.tokenizer import Tokenizer

Image = tuple[np.ndarray, tuple[int, int, int]]  # pixels [N, 3, P, P], (t, h, w)
MERGE = 4  # patches per image token
KINDS = "'text', 'messages' or 'image'"


class DataError(ConfigError):
    """Data that cannot be trained on; the message names the file and line, and what to do."""


class Record(NamedTuple):
    """The fields of one record, the name that errors call it by, and the folder that relative image paths start at."""

    fields: Mapping[str, Any]
    where: str
    folder: Path = Path()


class Block(NamedTuple):
    """Positions of one image's prompt, ids[start:stop], and of its placeholder."""

    start: int
    placeholder: int
    stop: int


@dataclass(frozen=True, eq=False)
class Document:
    """One training document; an image is ONE placeholder among the ids, its prompt one block that is never cut.

    ids int32 [n]; targets bool [n]: tokens with a loss; images: (pixels [N, 3, P, P], (t, h, w)), one per block.
    """

    key: str
    ids: np.ndarray
    targets: np.ndarray
    images: tuple[Image, ...] = ()
    blocks: tuple[Block, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def expanded(self) -> np.ndarray:
        """Tokens before each position once images are expanded, int64 [n + 1]."""
        sizes = np.ones(len(self) + 1, dtype=np.int64)
        sizes[0] = 0
        for block, (_, grid) in zip(self.blocks, self.images, strict=True):
            sizes[block.placeholder + 1] = image_tokens(grid)
        return sizes.cumsum()

    @cached_property
    def ends(self) -> np.ndarray:
        """Positions, ascending, where a window may end: after every token that is not inside a block."""
        allowed = np.ones(len(self) + 1, dtype=bool)
        allowed[0] = False
        for block in self.blocks:
            allowed[block.start + 1 : block.stop] = False
        return np.flatnonzero(allowed)


def image_tokens(grid_thw: tuple[int, int, int]) -> int:
    """Tokens that an image takes in the text (report section 2.4: 2x2 patches merge, frames are pooled)."""
    return grid_thw[1] * grid_thw[2] // MERGE


class Encoder:
    """Turns records into Documents with one tokenizer and one limit on image size."""

    def __init__(
        self, tokenizer: Tokenizer, *, vision: VisionConfig | None = None, max_image_tokens: int = 1 << 14
    ) -> None:
        """`vision` None refuses records with images; larger images are scaled down to `max_image_tokens`."""
        self.tokenizer = tokenizer
        self.images = None if vision is None else MediaConfig(in_patch_limit=MERGE * max_image_tokens)
        self.max_image_tokens = max_image_tokens
        special = tokenizer.special
        self.bos, self.eos = special["[BOS]"], special["[EOS]"]
        self.media_pad = special["<|media_pad|>"]
        self._media = [special[f"<|media_{part}|>"] for part in ("begin", "pad", "end")]

    def encode(self, record: Record) -> Document:
        """The Document of one record, by its fields.

        {"text"}: BOS, text, EOS, loss on everything after BOS. {"messages", optional "tools", "thinking", "effort",
        "images" (or "image" in the image parts)}: a conversation, loss on the assistant's tokens. {"image" (path, data
        URI, bytes, PIL image, array, or a list of them), "text", optional "prompt"}: BOS, image, prompt without loss,
        text and EOS with loss. {"ids", "targets", "patches"}: what a shard holds, as it is. Raises DataError.
        """
        kind, fields = record_kind(record), record.fields
        if kind == "ids":
            return self._document(record.where, fields["ids"], fields["targets"], tuple(fields["patches"]))
        if kind == "messages":
            return self._conversation(record)
        text = self.tokenizer.encode(fields["text"])
        before, images = [self.bos], ()
        if kind == "image":
            given = fields["image"]
            images, sizes = self._load(record, given if isinstance(given, list | tuple) else [given])
            prompts = [(image_prompt(width, height), True) for width, height in sizes]
            before += self.tokenizer.encode_segments([*prompts, (fields.get("prompt") or "", False)])
        targets = [False] * len(before) + [True] * (len(text) + 1)
        return self._document(record.where, [*before, *text, self.eos], targets, images)

    def _conversation(self, record: Record) -> Document:
        images, sizes = self._load(record, conversation_images(record))
        segments = _rendered(record, [image_prompt(*size) for size in sizes])
        ids, mask = encode_chat(self.tokenizer, segments)
        return self._document(record.where, ids, mask, images)

    def _load(self, record: Record, given: Sequence[Any]) -> tuple[tuple[Image, ...], list[tuple[int, int]]]:
        """The images' pixels and grids, and their original sizes."""
        if given and self.images is None:
            raise DataError(f"{record.where}: has an image, but the model has no vision part (vision_config)")
        items, sizes = [], []
        for image in given:
            try:
                given_image = _given(image, record.folder)
                patches = preprocess_image(given_image, self.images, max_tokens=self.max_image_tokens)
            except ImageError as error:
                raise DataError(f"{record.where}: {error}") from None
            items.append(patches.media)
            sizes.append(patches.size)
        return tuple(items), sizes

    def _document(
        self,
        key: str,
        ids: Sequence[int],
        targets: Sequence[bool],
        images: tuple[Image, ...],
    ) -> Document:
        id_array, target_array = np.asarray(ids, dtype=np.int32), np.asarray(targets, dtype=bool)
        begins, places, ends = (np.flatnonzero(id_array == token).tolist() for token in self._media)
        if not len(begins) == len(places) == len(ends) == len(images):
            raise DataError(f"{key}: {len(places)} image places in the text for {len(images)} images")
        blocks = tuple(Block(start, place, stop + 1) for start, place, stop in zip(begins, places, ends, strict=True))
        return Document(key, id_array, target_array, images, blocks)


def _given(image: Any, folder: Path) -> Any:
    """What an image field holds: the bytes of a data: URI, a path relative to the record's folder, else the image."""
    if isinstance(image, str) and image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ImageError(f"data URI: not base64 ({error})") from None
    return folder / image if isinstance(image, str | Path) else image


def check_record(record: Record) -> None:
    """Raise DataError for whatever would keep the record from being encoded, but for the pixels of its images.

    Conversations are rendered and image files looked for, so that a wrong line is found before training starts.
    """
    kind, images = record_kind(record), []
    if kind == "messages":
        images = conversation_images(record)
        _rendered(record, [image_prompt(1, 1)] * len(images))
    elif kind == "image":
        given = record.fields["image"]
        images = given if isinstance(given, list | tuple) else [given]
        if not images:
            raise DataError(f"{record.where}: 'image' is an empty list; name at least one")
    for image in images:
        if image is None or isinstance(image, Mapping | Number | list | tuple):
            raise DataError(f"{record.where}: an image is a path or a data URI, got {type(image).__name__}")
        named = isinstance(image, Path) or (isinstance(image, str) and not image.startswith("data:"))
        if named and not _is_file(record.folder / image):
            raise DataError(f"{record.where}: {record.folder / image}: no such file")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def conversation_images(record: Record) -> Sequence[Any]:
    """The images of a conversation, one for each image part: "images", or what the parts hold under "image".

    Raises DataError if their numbers differ.
    """
    parts = _media_parts(record.fields["messages"])
    images = record.fields.get("images")
    if images is not None and not isinstance(images, list | tuple):
        raise DataError(f"{record.where}: 'images' must be a list with one image per image part")
    if not images:
        images = [part["image"] for part in parts if "image" in part]
    if any(part.get("type") == "video" for part in parts):
        raise DataError(f"{record.where}: has a video part; records hold text and images only")
    if len(images) != len(parts):
        raise DataError(
            f"{record.where}: {len(images)} images for {len(parts)} image parts;"
            " name each in its part under 'image', or all in order in 'images'"
        )
    return images


def _rendered(record: Record, prompts: Sequence[str]) -> list[Segment]:
    """The segments of a conversation. Raises DataError naming what is wrong in it."""
    fields = record.fields
    options = {name: fields[name] for name in ("tools", "thinking", "effort") if name in fields}
    if not isinstance(options.get("thinking", True), bool):
        raise DataError(f"{record.where}: 'thinking' must be true or false, got {options['thinking']!r}")
    for part in _media_parts(fields["messages"]):
        if "size" in part:
            raise DataError(f"{record.where}: an image part has a 'size'; leave it out, the image's own is used")
    try:
        return render(fields["messages"], add_generation_prompt=False, image_prompts=list(prompts), **options)
    except ChatError as error:
        raise DataError(f"{record.where}: {error}") from None


def record_kind(record: Record) -> str:
    """'text', 'messages', 'image' or a shard's 'ids', once sound. Raises DataError naming the record."""
    fields, where = record.fields, record.where
    if not isinstance(fields, Mapping):
        raise DataError(f"{where}: expected an object with {KINDS}, got {type(fields).__name__}")
    kind = next((name for name in ("ids", "messages", "image", "text") if name in fields), None)
    if kind is None:
        raise DataError(f"{where}: no {KINDS} among its fields {sorted(map(str, fields))}")
    if kind == "messages" and not (isinstance(fields["messages"], list) and fields["messages"]):
        raise DataError(f"{where}: 'messages' must be a non-empty list")
    if kind not in ("ids", "messages") and not isinstance(fields.get("text"), str):
        raise DataError(f"{where}: 'text' must be a string")
    if fields.get("prompt") is not None and not isinstance(fields["prompt"], str):
        raise DataError(f"{where}: 'prompt' must be a string")
    return kind


def _media_parts(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The image and video parts of a conversation, in order."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    kinds = ("image", "image_url", "video")
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") in kinds]


def record_texts(record: Record) -> Iterator[str]:
    """The texts that a record holds, conversations message by message; none of a shard's, which are encoded."""
    fields, kind = record.fields, record_kind(record)
    if kind == "ids":
        return
    if kind != "messages":
        yield from (fields[name] for name in ("prompt", "text") if fields.get(name))
        return
    for message in fields["messages"]:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        yield from (part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))
