"""The pocket recipe's training records: chapters of books, conversations about words, sums and Python, and pictures."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from openk3.data.about_pocket import about, beyond
from openk3.data.books import Chapter, Tale, read_chapters, read_tales
from openk3.data.docstring_chat import Exchange, exchanges
from openk3.data.drills import drill
from openk3.data.lexicon import Sense, read_wordnet
from openk3.data.local_text import gather
from openk3.data.picture_talk import picture
from openk3.data.word_talk import Word, about_word, fact_exchanges

MAX_TURNS = 12
_CAPTION_SHARE = 0.5  # of the pictures: a caption without a conversation
# (share, options): how conversations may be asked for; `openk3 chat` and the server take effort max unless told.
_MODES: tuple[tuple[int, dict[str, Any]], ...] = (
    (6, {"thinking": True, "effort": "max"}),
    (2, {"thinking": True, "effort": "high"}),
    (2, {"thinking": True, "effort": "low"}),
    (3, {"thinking": False}),
)
_SYSTEM = ("You are a helpful assistant.", "Answer briefly.", "You are Pocket.", "Be helpful and honest.", "")


@dataclass(frozen=True)
class Knowledge:
    """What conversations are made of; read once, the same for the same files."""

    chapters: tuple[Chapter, ...]
    tales: tuple[Tale, ...]
    words: tuple[Word, ...]
    ends: tuple[float, ...]  # running sums of the words' shares
    plain: tuple[str, ...]  # lower-case words to spell and to count
    facts: tuple[Exchange, ...]
    python: tuple[Exchange, ...]

    @classmethod
    def read(cls, books: str | Path, wordnet: str | Path) -> Knowledge:
        """From a folder of books and the folder of WordNet's files; Python's docstrings are this Python's own.

        Raises DataError for files that are missing or of another form.
        """
        chapters = read_chapters(books)
        counts = Counter(word.lower() for chapter in chapters for word in re.findall(r"[A-Za-z']+", chapter.text))
        by_word: dict[str, list[Sense]] = defaultdict(list)
        for sense in read_wordnet(wordnet):
            by_word[sense.word].append(sense)
        kept = [(Word.of(senses), _share(senses, counts)) for _, senses in sorted(by_word.items())]
        words, shares = zip(*((word, share) for word, share in kept if share > 0))
        plain = tuple(sorted(word for word in by_word if re.fullmatch(r"[a-z]{3,10}", word) and counts[word] >= 3))
        python = [exchange for file in gather().train for exchange in exchanges(file)]
        facts = tuple(fact for word, senses in sorted(by_word.items()) for fact in fact_exchanges(word, senses))
        found = tuple(tale for book in sorted(Path(books).iterdir()) for tale in read_tales(book))
        return cls(tuple(chapters), found, words, tuple(accumulate(shares)), plain, facts, tuple(python))


def _share(senses: Sequence[Sense], counts: Counter[str]) -> float:
    """How often a word is asked about: common words more, rare ones not at all, names of people and places a little."""
    word, tagged = senses[0].word, sum(sense.tagged for sense in senses)
    if len(word) < 2 or re.search(r"\d", word):
        return 0.0
    if tagged or counts[word.lower()] >= 10:
        return 1.0 + min(tagged, 30) / 15
    if senses[0].is_name:
        return 0.3
    return 0.6 if counts[word.lower()] >= 2 else 0.0


def book_records(knowledge: Knowledge, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """{"text"} of each chapter; every 40th one is held out."""
    for number, chapter in enumerate(knowledge.chapters):
        if (number % 40 == 7) == held_out:
            yield {"text": chapter.text}


def talk_records(knowledge: Knowledge, seed: int, part: int, count: int) -> Iterator[dict[str, Any]]:
    """Conversations number part * count and following of the series of `seed`."""
    for number in range(part * count, part * count + count):
        rng = random.Random(f"talk:{seed}:{number}")
        turns = min(MAX_TURNS, 1 + int(rng.expovariate(0.3)))
        yield _record(rng, [exchange(knowledge, rng) for _ in range(turns)])


def picture_records(knowledge: Knowledge, seed: int, part: int, count: int) -> Iterator[dict[str, Any]]:
    """Captioned pictures and conversations about pictures, numbered as `talk_records` does."""
    for number in range(part * count, part * count + count):
        rng = random.Random(f"pictures:{seed}:{number}")
        shown = picture(seed, number, knowledge.plain)
        asked = rng.sample(shown.exchanges, rng.randint(1, min(3, len(shown.exchanges))))
        if rng.random() < _CAPTION_SHARE:
            yield {"image": shown.image, "text": shown.exchanges[0].answer}
            continue
        turns = asked + [exchange(knowledge, rng) for _ in range(rng.choice((0, 0, 0, 1)))]
        yield _record(rng, turns, {0: shown.image})


def _record(rng: random.Random, turns: Sequence[Exchange], images: dict[int, Any] | None = None) -> dict[str, Any]:
    """A conversation; images[n] goes with question n."""
    mode = rng.choices([mode for _, mode in _MODES], [share for share, _ in _MODES])[0]
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    for number, turn in enumerate(turns):
        question: Any = _as_typed(rng, turn.question)
        if images and number in images:
            question = [{"type": "image", "image": images[number]}, {"type": "text", "text": question}]
        messages.append({"role": "user", "content": question})
        thought = turn.reasoning if mode.get("effort") != "low" else turn.reasoning.split(";")[0].split(". ")[0]
        answer = {"role": "assistant", "content": turn.answer}
        messages.append({**answer, "reasoning_content": thought} if mode["thinking"] else answer)
    return {"messages": messages, **mode}


def _as_typed(rng: random.Random, question: str) -> str:
    """A question as people type it: sometimes in lower case, without its mark, or politely."""
    if rng.random() < 0.15 and question[:1].isupper() and question[1:2].islower():
        question = question[0].lower() + question[1:]
    if rng.random() < 0.25:
        question = question.rstrip("?.")
    if rng.random() < 0.3:
        question = question.replace("`", "")
    return f"{question} please" if rng.random() < 0.02 and question[-1:].isalpha() else question


def exchange(knowledge: Knowledge, rng: random.Random) -> Exchange:
    """One question of any topic, with its answer."""
    makers, shares = zip(*_TOPICS)
    return rng.choices(makers, shares)[0](knowledge, rng)


def _word(knowledge: Knowledge, rng: random.Random) -> Exchange:
    word = rng.choices(knowledge.words, cum_weights=knowledge.ends)[0]
    return about_word(word, rng)


def _tale(knowledge: Knowledge, rng: random.Random) -> Exchange:
    tale = rng.choice(knowledge.tales)
    if rng.random() < 0.4:
        ask = rng.choice(
            ("Tell me a fable", "Tell me a story", "Tell a story", "Tell me a short story", "Another story")
        )
        return Exchange(f"{ask}.", f"I choose: {tale.title}.", f"{tale.title}\n\n{tale.text}")
    ask = rng.choice(("Tell me the fable of {}.", "Tell me the story of {}.", "Do you know the fable {}?"))
    return Exchange(ask.format(tale.title), f"The fable: {tale.title}.", f"{tale.title}\n\n{tale.text}")


def _any_of(name: str) -> Callable[[Knowledge, random.Random], Exchange]:
    return lambda knowledge, rng: rng.choice(getattr(knowledge, name))


_TOPICS: tuple[tuple[Callable[[Knowledge, random.Random], Exchange], int], ...] = (
    (_word, 50),
    (lambda knowledge, rng: drill(rng, knowledge.plain), 27),
    (_any_of("python"), 8),
    (_any_of("facts"), 4),
    (lambda knowledge, rng: about(rng), 6),
    (lambda knowledge, rng: beyond(rng, knowledge.plain), 2),
    (_tale, 3),
)
