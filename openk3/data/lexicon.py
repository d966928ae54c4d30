"""Entries of WordNet's database files: a word, what kind it is, what it means, words like it and opposite to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from openk3.data.documents import DataError

PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
MAX_SENSES = 2  # of a word within one part of speech
MAX_WORDS = 3  # of a compound
MAX_MEANING = 160  # characters
# Meanings that a model should not volunteer: slurs, obscenities and the like. Their words are left out altogether.
_UNFIT = re.compile(
    r"slur|offensive|obscen|disparag|vulgar|derogat|insult|sexual|genital|copulat|prostitut|penis|vagina"
)


@dataclass(frozen=True)
class Sense:
    """One meaning of a word; `tagged` says how often it was found in WordNet's annotated texts."""

    word: str
    part: str  # noun, verb, adjective, adverb
    meaning: str
    example: str = ""
    alike: tuple[str, ...] = ()
    opposite: str = ""
    kind: str = ""  # what it is a kind of
    is_name: bool = False
    is_first: bool = True  # of the words that share this meaning
    tagged: int = 0


@dataclass(frozen=True)
class _Synset:
    words: tuple[str, ...]
    meaning: str
    example: str
    above: str  # offset of what it is a kind of
    is_name: bool
    opposites: dict[int, tuple[str, int]]  # number of the word here -> (offset, number of the word there)


def read_wordnet(folder: str | Path) -> list[Sense]:
    """The first senses of every word in the database files below `folder` (data.noun, index.noun, ...), in file order.

    Raises DataError if a file is missing or of another form.
    """
    folder = Path(folder)
    found: list[Sense] = []
    for part in PARTS:
        try:
            synsets = dict(_synsets(folder / f"data.{part}"))
            found += _senses(folder / f"index.{part}", part, synsets)
        except FileNotFoundError as error:
            raise DataError(f"{error.filename}: no such file; name the folder of WordNet's database files") from None
        except (ValueError, IndexError, KeyError) as error:
            raise DataError(f"{folder}: data.{part} and index.{part} are not WordNet's ({error})") from None
    counts = _counts(folder / "cntlist.rev")
    unfit = {sense.word.lower() for sense in found if _UNFIT.search(sense.meaning)}
    return [
        replace(sense, tagged=counts.get((sense.word.lower(), sense.part), 0))
        for sense in found
        if sense.word.lower() not in unfit and not _UNFIT.search(sense.example)
    ]


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if not line.startswith("  "))  # the licence is indented


def _synsets(path: Path) -> Iterator[tuple[str, _Synset]]:
    for line in _lines(path):
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        count = int(fields[3], 16)
        words = tuple(_plain(word) for word in fields[4 : 4 + 2 * count : 2])
        place = 4 + 2 * count
        pointers = [fields[place + 1 + 4 * n : place + 5 + 4 * n] for n in range(int(fields[place]))]
        above = next((offset for symbol, offset, *_ in pointers if symbol in ("@", "@i")), "")
        opposites = {
            int(numbers[:2], 16): (offset, int(numbers[2:], 16))
            for symbol, offset, _, numbers in pointers
            if symbol == "!"
        }
        meaning, example = _gloss(gloss)
        is_name = any(symbol == "@i" for symbol, *_ in pointers)
        yield fields[0], _Synset(words, meaning, example, above, is_name, opposites)


def _senses(path: Path, part: str, synsets: dict[str, _Synset]) -> Iterator[Sense]:
    for line in _lines(path):
        fields = line.split()
        offsets = fields[-int(fields[2]) :]
        for offset in offsets[:MAX_SENSES]:
            synset = synsets[offset]
            number = next((n for n, word in enumerate(synset.words) if word.lower() == _plain(fields[0])), 0)
            word = synset.words[number]
            if len(word.split()) > MAX_WORDS or not synset.meaning:
                continue
            there = synset.opposites.get(number + 1)
            yield Sense(
                word,
                PARTS[part],
                synset.meaning,
                synset.example,
                tuple(other for other in synset.words if other != word)[:4],
                synsets[there[0]].words[there[1] - 1] if there else "",
                synsets[synset.above].words[0] if synset.above in synsets else "",
                synset.is_name,
                number == 0,
            )


def _counts(path: Path) -> dict[tuple[str, str], int]:
    """How often each word was tagged: lines `word%digit:...  sense  count`, where the digit is the part of speech."""
    if not path.exists():
        return {}
    kinds = {"1": "noun", "2": "verb", "3": "adjective", "4": "adverb", "5": "adjective"}
    counts: dict[tuple[str, str], int] = {}
    for line in _lines(path):
        key, _, count = line.split()
        word, _, rest = key.partition("%")
        place = (_plain(word), kinds[rest[0]])
        counts[place] = counts.get(place, 0) + int(count)
    return counts


def _plain(word: str) -> str:
    """A word as it is written: blanks for underscores, no syntactic marker such as (p)."""
    return re.sub(r"\((?:a|p|ip)\)$", "", word).replace("_", " ")


def _gloss(text: str) -> tuple[str, str]:
    """(meaning, first example) of a gloss `meaning; "example"; ...`; no meaning if it is too long to be one answer."""
    quoted = re.search(r'"([^"]{8,100})"', text)
    meaning = re.split(r';\s*"', text.strip())[0].strip(" ;")
    meaning = re.sub(r"^\([^)]*\)\s*", "", meaning) if len(meaning) > MAX_MEANING else meaning
    if len(meaning) > MAX_MEANING:
        meaning = meaning.split(";")[0].strip()
    fits = len(meaning) <= MAX_MEANING and '"' not in meaning
    return meaning if fits else "", quoted[1].strip() if quoted else ""
