"""Tokenizer: byte-level BPE in the released tiktoken format, trained here or loaded, with K3's 256 control tokens."""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers

from openk3.config.json_file import JsonError, read_file, read_json
from openk3.runtime.run_folder import write_atomic

NUM_SPECIAL = 256
MAX_CHARS = 400_000  # text is cut into pieces of this many characters before BPE
MAX_RUN = 25_000  # and inside runs of (non-)whitespace, where BPE would otherwise slow down
RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

# Offsets from the number of ranks; every other offset below 256 is <|reserved_token_ID|>.
SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_SUFFIX}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_LONG_RUN = re.compile(rf"\s{{{MAX_RUN + 1},}}|\S{{{MAX_RUN + 1},}}")


class TokenizerError(ValueError):
    """A tokenizer file or request is unusable; one line naming the file, the line and what to do."""


class Tokenizer:
    """Text to token ids and back. Ids below `num_ranks` are text, the 256 above it are `special` (name -> id)."""

    def __init__(self, ranks: dict[bytes, int], special: dict[str, int] | None = None) -> None:
        self.num_ranks = len(ranks)
        self.vocab_size = self.num_ranks + NUM_SPECIAL
        self.special = special_tokens(self.num_ranks) if special is None else special
        self._ranks = ranks
        self._encoding = tiktoken.Encoding(
            "openk3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )

    @property
    def encoding(self) -> tiktoken.Encoding:
        """The same vocabulary for libraries that read tiktoken's."""
        return self._encoding

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read `tiktoken.model` (or a directory that holds it), and the special names of the config beside it.

        Raises TokenizerError naming the file and line at fault.
        """
        path = Path(path)
        path = path / RANKS_FILE if path.is_dir() else path
        ranks = read_ranks(path)
        config = path.with_name(CONFIG_FILE)
        special = _read_special(config, len(ranks)) if config.exists() else None
        return cls(ranks, special)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, progress: bool = False) -> Tokenizer:
        """Learn byte-level BPE from `texts`; same texts in the same order, same tokenizer.

        `vocab_size` counts the 256 special ids. A small text may not hold that many pairs seen twice: the tokenizer
        is then smaller, so read the size from `.vocab_size`. Raises TokenizerError if the size is below 512.
        """
        return cls(export_ranks(train_bpe(texts, vocab_size - NUM_SPECIAL, progress=progress)))

    def save(self, directory: str | Path) -> None:
        """Write `tiktoken.model` and `tokenizer_config.json` into `directory` (made if missing)."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in self._ranks.items()]
        write_atomic(directory / RANKS_FILE, lambda path: path.write_bytes(b"".join(lines)))
        named = {name: i for name, i in self.special.items() if name != _reserved(i)}
        config = {
            "tokenizer_class": "TikTokenTokenizer",
            "added_tokens_decoder": {str(i): {"content": name, "special": True} for name, i in named.items()},
            "bos_token": "[BOS]",
            "eos_token": "<|end_of_msg|>",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
        }
        text = json.dumps(config, indent=2) + "\n"
        write_atomic(directory / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: names of control tokens in it are ordinary characters, so no id is a special one."""
        ids: list[int] = []
        for piece in split_text(text):
            ids += self._encoding.encode_ordinary(piece)
        return ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, allow_special) segments, each encoded by itself; only allowed ones may hold control tokens."""
        ids: list[int] = []
        for text, allow_special in segments:
            ids += self.encode_control(text) if allow_special else self.encode(text)
        return ids

    def encode_control(self, text: str) -> list[int]:
        """Ids of trusted text, where names of control tokens stand for the tokens."""
        ids: list[int] = []
        for piece in split_text(text):
            ids += self._encoding.encode(piece, allowed_special="all")
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes behind ids. Raises TokenizerError for an id outside the vocabulary."""
        ids = list(ids)
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise TokenizerError(f"token id {i}: outside the vocabulary (0..{self.vocab_size - 1})")
        return self._encoding.decode_bytes(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; bytes that are no UTF-8 become one U+FFFD per broken piece, control tokens their names."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decoder(self) -> StreamDecoder:
        """An incremental decoder for ids that arrive one by one."""
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes ids as they arrive, holding back characters that are still incomplete.

    The pieces of `feed` and the last one of `finish` join to exactly `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: int | Iterable[int]) -> str:
        """Text that became certain with these ids (often empty inside a character)."""
        ids = [ids] if isinstance(ids, int) else ids
        return self._utf8.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        """What was held back: nothing, or one U+FFFD for a character cut short. Ready for the next text."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def special_tokens(num_ranks: int) -> dict[str, int]:
    """Names and ids of the 256 control tokens of a vocabulary with `num_ranks` text tokens (released: 163,584)."""
    names = {offset: name for name, offset in SPECIAL_OFFSETS.items()}
    ids = range(num_ranks, num_ranks + NUM_SPECIAL)
    return {names.get(i - num_ranks, _reserved(i)): i for i in ids}


def well_formed(text: str) -> str:
    """Text that has UTF-8 bytes: half a surrogate pair becomes U+FFFD, as `encode` reads it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def split_text(text: str) -> Iterator[str]:
    """Cut text at 400,000 characters and runs of (non-)whitespace at 25,000, as the released tokenizer does."""
    for first in range(0, len(text), MAX_CHARS):
        piece = text[first : first + MAX_CHARS]
        start = 0
        for run in _LONG_RUN.finditer(piece):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield piece[start:cut]
                start = cut
        yield piece[start:]


def train_bpe(texts: Iterable[str], num_ranks: int, *, progress: bool = False) -> tokenizers.Tokenizer:
    """Learn byte-level BPE with the released split pattern. Raises TokenizerError below 256 ranks."""
    if num_ranks < 256:
        raise TokenizerError(f"vocab_size: must be at least {256 + NUM_SPECIAL} (256 bytes and {NUM_SPECIAL} specials)")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=num_ranks,
        min_frequency=2,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    model.train_from_iterator((piece for text in texts for piece in split_text(well_formed(text))), trainer)
    return model


def export_ranks(model: tokenizers.Tokenizer) -> dict[bytes, int]:
    """tiktoken ranks of a byte-level BPE model: the 256 bytes by value, then merges in the order they were learnt."""
    letters = _byte_letters()
    by_id = sorted(model.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(letters[letter] for letter in name) for name, _ in by_id]
    merged = [token for token in tokens if len(token) > 1]
    return {token: rank for rank, token in enumerate([bytes([b]) for b in range(256)] + merged)}


def read_ranks(path: str | Path) -> dict[bytes, int]:
    """Read and check a tiktoken rank file. Raises TokenizerError naming the file and line."""
    path = Path(path)
    try:
        lines = read_file(path).splitlines()
    except FileNotFoundError:
        raise TokenizerError(f"{path}: no such file; expected a tiktoken rank file") from None
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror})") from None
    except JsonError as error:
        raise TokenizerError(str(error)) from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        token, rank = _read_rank(line, f"{path}:{number}")
        if token in ranks:
            raise TokenizerError(f"{path}:{number}: token {token!r} was already given rank {ranks[token]}")
        if rank != len(ranks):
            raise TokenizerError(
                f"{path}:{number}: rank {rank}, but ranks must count up and this is number {len(ranks)}"
            )
        ranks[token] = rank
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise TokenizerError(f"{path}: no token for the single byte 0x{missing[0]:02x}; not a byte-level rank file")
    return ranks


def _read_rank(line: bytes, where: str) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit() or len(fields[1]) > 9:
        raise TokenizerError(f"{where}: expected a base64 token and its rank, got {line[:40]!r}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise TokenizerError(f"{where}: {fields[0][:40]!r} is not base64 ({error})") from None
    if not token:
        raise TokenizerError(f"{where}: the token is empty")
    return token, int(fields[1])


def _read_special(path: Path, num_ranks: int) -> dict[str, int]:
    try:
        config = read_json(path)
    except JsonError as error:
        raise TokenizerError(str(error)) from None
    entries: Any = config.get("added_tokens_decoder") or {} if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder must map token ids to tokens")
    names = {i: name for name, i in special_tokens(num_ranks).items()}
    ids = {str(i): i for i in names}
    for key, entry in entries.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if key not in ids or not isinstance(name, str) or not name or name != well_formed(name):
            last = num_ranks + NUM_SPECIAL - 1
            raise TokenizerError(
                f"{path}: added_tokens_decoder.{key[:40]}: expected an id in {num_ranks}..{last} with its content"
            )
        names[ids[key]] = name
    special = {name: i for i, name in names.items()}
    if len(special) != NUM_SPECIAL:
        raise TokenizerError(f"{path}: added_tokens_decoder gives one name to two ids")
    for name, offset in SPECIAL_OFFSETS.items():
        if special.get(name) != num_ranks + offset:
            raise TokenizerError(f"{path}: {name} must be id {num_ranks + offset}; this is not a K3 tokenizer")
    return special


def _reserved(token_id: int) -> str:
    return f"<|reserved_token_{token_id}|>"


def _byte_letters() -> dict[str, int]:
    """The printable letters that byte-level BPE writes bytes as: visible Latin-1 as itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + n): b for n, b in enumerate(hidden)}
