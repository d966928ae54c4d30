"""The quickstart's training mix as JSONL files: local text, conversations from its docstrings, rendered images."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from openk3.data.docstring_chat import conversations
from openk3.data.local_text import Corpus, TextFile, gather
from openk3.data.render import Rendered, render

QUESTIONS = ("What is in this image?", "Describe the image.", "Write what makes this image.")
_IMAGE_CHAT_SHARE = 0.2  # conversations about images, of all conversations
_CHAT_SEED, _IMAGE_CHAT_SEED = 1, 2  # added to the run's seed, so that no two series repeat each other


@dataclass(frozen=True)
class Mix:
    """Files of one mix, and each training file's share of the tokens."""

    text: Path
    captions: Path
    chat: Path
    held_out: Path
    shares: tuple[float, float, float]  # text, captions, conversations

    @classmethod
    def at(cls, folder: Path, shares: tuple[float, float, float]) -> Mix:
        """The files that `write_mix` writes into `folder`."""
        text, captions, chat, held_out = (folder / f"{name}.jsonl" for name in ("text", "captions", "chat", "held_out"))
        return cls(text, captions, chat, held_out, shares)

    @property
    def paths(self) -> tuple[str, ...]:
        """The training files, absolute, in the order of `shares`."""
        return tuple(str(path.resolve()) for path in (self.text, self.captions, self.chat))


def write_mix(mix: Mix, corpus: Corpus, *, num_images: int, num_conversations: int, seed: int = 0) -> None:
    """Write the four files of `mix`, the same for the same arguments.

    Images lie inside the lines as data URIs. Conversations come from the corpus's own docstrings, or from the standard
    library's where it has none; a fifth of them are about images.
    """
    _write(mix.text, ({"text": file.text} for file in corpus.train))
    _write(mix.held_out, ({"text": file.text} for file in corpus.held_out))
    _write(mix.captions, (caption_record(render(seed, i)) for i in range(num_images)))
    talks = itertools.islice(_talks(corpus, seed + _CHAT_SEED), num_conversations)
    _write(mix.chat, _with_image_talks(talks, seed + _IMAGE_CHAT_SEED))


def caption_record(item: Rendered) -> dict[str, Any]:
    """{"image", "text"} with the image as a data URI."""
    return {"image": data_uri(item.image), "text": item.text}


def data_uri(image: Image.Image) -> str:
    """The image as a PNG inside a data: URI."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def tokenizer_texts(mix: Mix, corpus: Corpus, max_bytes: int) -> Iterator[str]:
    """What to train a tokenizer on: pieces of the text, the captions, and what conversations say."""
    for name, share in ((mix.captions, 0.05), (mix.chat, 0.1)):
        yield from itertools.islice(_said(name), max(1, int(share * max_bytes / 60)))
    room = int(0.85 * max_bytes)
    for file in corpus.train if corpus.train_bytes <= room else _spread(corpus.train, room):
        yield file.text


def _spread(files: tuple[TextFile, ...], max_bytes: int) -> Iterator[TextFile]:
    """Files from all over the corpus until `max_bytes` are given."""
    order = list(files)
    random.Random(0).shuffle(order)
    for file in order:
        if max_bytes <= 0:
            return
        yield TextFile(file.name, file.text[:max_bytes], file.num_bytes)
        max_bytes -= file.num_bytes


def _said(path: Path) -> Iterator[str]:
    """Captions, or questions, reasoning and answers."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            for message in record.get("messages", ()):
                yield from (
                    message[key] for key in ("content", "reasoning_content") if isinstance(message.get(key), str)
                )
            if "text" in record:
                yield record["text"]


def _talks(corpus: Corpus, seed: int) -> Iterator[dict[str, Any]]:
    """The corpus's conversations, file by file in a mixed order; the standard library's where it has none."""
    for files in (corpus.train, gather().train):
        mixed = list(files)
        random.Random(f"talks:{seed}").shuffle(mixed)
        talks = conversations(mixed, seed)
        first = next(talks, None)
        if first is not None:
            yield first
            yield from talks
            return


def _with_image_talks(talks: Iterable[dict[str, Any]], seed: int) -> Iterator[dict[str, Any]]:
    """Each conversation, and after some of them one about images in the same form."""
    rng = random.Random(f"image talks:{seed}")
    number = 0
    for talk in talks:
        yield talk
        if rng.random() < _IMAGE_CHAT_SHARE / (1 - _IMAGE_CHAT_SHARE):
            items = [render(seed, number + i) for i in range(rng.randint(1, 3))]
            number += len(items)
            options = {key: talk[key] for key in ("thinking", "effort") if key in talk}
            yield {"messages": [m for item in items for m in _image_turn(item, rng, talk["thinking"])], **options}


def _image_turn(item: Rendered, rng: random.Random, thinking: bool) -> list[dict[str, Any]]:
    question = [{"type": "image", "image": data_uri(item.image)}, {"type": "text", "text": rng.choice(QUESTIONS)}]
    answer: dict[str, Any] = {"role": "assistant", "content": item.text}
    if thinking:
        answer["reasoning_content"] = f"It is of the kind `{item.kind}`."
    return [{"role": "user", "content": question}, answer]


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
