"""Questions about a word: what it means, words alike and opposite, what kind of thing it is, and facts in its gloss."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openk3.data.docstring_chat import Exchange
from openk3.data.lexicon import Sense

_MEANING = (
    "What does {} mean?", 'What does "{}" mean?', "What is the meaning of {}?", "Define {}.", "define {}",
    "Explain {}.",
    "What is {}?", "{}", "Meaning of {}", "What does the word {} mean?", "Tell me about {}.", "What's {}?",
    "Explain the word {}.",
)  # fmt: skip
_ALIKE = ("What is another word for {}?", "Give me a synonym for {}.", "Synonyms of {}",
          "Which words mean the same as {}?", "Another word for {}?")  # fmt: skip
_OPPOSITE = ("What is the opposite of {}?", "Opposite of {}", "What is an antonym of {}?", "The opposite of {}?")
_USE = ("Use {} in a sentence.", "Give me an example of {}.", "How is the word {} used?", "Show me a sentence with {}.")
_NAMES = (
    "Who is {}?",
    "Who was {}?",
    "What is {}?",
    "Where is {}?",
    "Tell me about {}.",
    "{}",
    "What do you know about {}?",
)
_CAPITAL = re.compile(
    r"\bcapital(?: and largest city)? of (?:the )?([A-Z][A-Za-z ]+?)(?: and | in | on | located|;|,|$)"
)
_FORMER = re.compile(r"\b(?:was|were|former|formerly|until|ancient)\b")


@dataclass(frozen=True)
class Word:
    """A word with the first sense of each part of speech, the most frequent part first."""

    word: str
    senses: tuple[Sense, ...]

    @classmethod
    def of(cls, senses: Sequence[Sense]) -> Word:
        """From all senses of one word, in the database's order."""
        first: dict[str, Sense] = {}
        for sense in senses:
            first.setdefault(sense.part, sense)
        return cls(senses[0].word, tuple(sorted(first.values(), key=lambda sense: -sense.tagged)[:2]))

    @property
    def meaning(self) -> str:
        """The answer to what it means: always the same one."""
        if self.senses[0].is_name:
            return f"{self.word}: {self.senses[0].meaning}."
        return " ".join(f"{self.word} ({sense.part}): {sense.meaning}." for sense in self.senses)


def about_word(word: Word, rng: random.Random) -> Exchange:
    """One exchange about the word; its meaning most often."""
    sense = word.senses[0]
    ways = [_meaning] * 5
    ways += [_alike] * 2 if sense.alike and not sense.is_name else []
    ways += [_opposite] * 2 if any(sense.opposite for sense in word.senses) else []
    ways += [_kind] if sense.kind and sense.part == "noun" and not sense.is_name else []
    ways += [_use] if sense.example else []
    return rng.choice(ways)(word, rng)


def _meaning(word: Word, rng: random.Random) -> Exchange:
    sense = word.senses[0]
    if sense.is_name:
        return Exchange(rng.choice(_NAMES).format(word.word), f"{word.word} is a name.", word.meaning)
    noun = sense.part == "noun" and rng.random() < 0.4
    article = "an" if word.word[0] in "aeiouAEIOU" else "a"
    question = f"What is {article} {word.word}?" if noun else rng.choice(_MEANING).format(word.word)
    return Exchange(question, f"The meaning of a word: {word.word}, {sense.part}.", word.meaning)


def _alike(word: Word, rng: random.Random) -> Exchange:
    sense = word.senses[0]
    return Exchange(
        rng.choice(_ALIKE).format(word.word), f"Words like {word.word}: {sense.meaning}.", ", ".join(sense.alike)
    )


def _opposite(word: Word, rng: random.Random) -> Exchange:
    sense = next(sense for sense in word.senses if sense.opposite)
    answer = f"The opposite of {word.word} is {sense.opposite}."
    return Exchange(rng.choice(_OPPOSITE).format(word.word), f"{word.word}: {sense.meaning}.", answer)


def _kind(word: Word, rng: random.Random) -> Exchange:
    sense = word.senses[0]
    article = "an" if word.word[0] in "aeiouAEIOU" else "a"
    question = rng.choice(("What kind of thing is {0} {1}?", "What sort of thing is {0} {1}?")).format(
        article, word.word
    )
    return Exchange(question, f"{word.word}: {sense.meaning}.", f"It is a kind of {sense.kind}.")


def _use(word: Word, rng: random.Random) -> Exchange:
    sense = word.senses[0]
    example = sense.example[0].upper() + sense.example[1:]
    return Exchange(rng.choice(_USE).format(word.word), f"{word.word}: {sense.meaning}.", example)


def fact_exchanges(word: str, senses: Sequence[Sense]) -> Iterator[Exchange]:
    """What glosses say of capitals and chemical elements, as questions."""
    for sense in (sense for sense in senses if sense.is_first):
        capital = _CAPITAL.search(sense.meaning)
        if sense.is_name and capital and not _FORMER.search(sense.meaning):
            answer = f"The capital of {capital[1]} is {word}."
            yield Exchange(f"What is the capital of {capital[1]}?", "A capital.", answer)
        number = next((other for other in sense.alike if other.startswith("atomic number ")), "")
        if number and word.islower():
            symbol = next((other for other in sense.alike if re.fullmatch("[A-Z][a-z]?", other)), "")
            atomic = f"The atomic number of {word} is {number.rpartition(' ')[2]}."
            yield Exchange(f"What is the atomic number of {word}?", "A chemical element.", atomic)
            if symbol:
                yield Exchange(
                    f"What is the symbol of {word}?", "A chemical element.", f"The symbol of {word} is {symbol}."
                )
                yield Exchange(f"Which element is {symbol}?", "A chemical element.", f"{symbol} is {word}.")
