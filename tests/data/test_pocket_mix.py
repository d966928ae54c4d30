"""The pocket recipe's records: WordNet's files, books, exercises whose answers are right, pictures, conversations."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest

from openk3.data import about_pocket, drills
from openk3.data.books import read_chapters, read_tales
from openk3.data.documents import DataError, Record, check_record
from openk3.data.lexicon import read_wordnet
from openk3.data.picture_talk import picture
from openk3.data.pocket_mix import Knowledge, book_records, exchange, picture_records, talk_records
from openk3.data.pocket_shards import Amounts, Shards, tokenizer_texts
from openk3.data.shard import open_source
from openk3.data.word_talk import Word, fact_exchanges
from openk3.inputs.tokenizer import Tokenizer
from openk3.recipes import pocket

WORDS = ("banana", "house", "window", "strawberry", "cat", "river")
_MORE = ((701, "house"), (702, "river"), (703, "window"))
# Lines of the database's form, with words and glosses of our own.
NOUNS = (
    '00000100 03 n 02 thing 0 stuff 0 000 | what is there; "a thing of beauty"\n'
    "00000200 15 n 03 Testburg 0 Testville 0 capital_of_Testland 0 001 @i 00000100 n 0000 | the capital of Testland\n"
    "00000300 27 n 03 testium 0 Tt 0 atomic_number_200 0 001 @ 00000100 n 0000 | a metal that nobody has seen\n"
    "00000400 10 n 01 rudeword 0 000 | an offensive name for a test\n"
    + "".join(f"00000{n} 03 n 01 {word} 0 000 | a {word}, seen from here\n" for n, word in _MORE)
)
INDEX = (
    "thing n 1 0 1 1 00000100\nstuff n 1 0 1 0 00000100\ntestburg n 1 1 @i 1 0 00000200\n"
    "testville n 1 1 @i 1 0 00000200\ntestium n 1 1 @ 1 0 00000300\nrudeword n 1 0 1 0 00000400\n"
    + "".join(f"{word} n 1 0 1 0 00000{n}\n" for n, word in _MORE)
)
ADJECTIVES = (
    "00000500 00 a 01 open(a) 0 001 ! 00000600 a 0101 | not closed\n"
    "00000600 00 a 01 closed 0 001 ! 00000500 a 0101 | not open\n"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(books, WordNet's files), both tiny."""
    books, wordnet = tmp_path_factory.mktemp("books"), tmp_path_factory.mktemp("wordnet")
    (books / "tales").mkdir()
    body = "A fox said that it was wise. " * 12
    (books / "tales" / "fables.xhtml").write_text(
        f"<article><h2>The Fox</h2><p>{body}</p><p>&#8220;Yes&#8221;,<br/>it\xa0said.</p></article>"
        "<article><h2>Too Short</h2><p>No.</p></article>"
    )
    (books / "tales" / "imprint.xhtml").write_text("<p>printed somewhere</p>")
    for n in range(9):
        (books / "tales" / f"chapter-{n}.txt").write_text(f"Thing {n}: the house by the river had an open window. " * 3)
    for part in ("noun", "adj", "verb", "adv"):
        (wordnet / f"data.{part}").write_text("  1 licence\n" + {"noun": NOUNS, "adj": ADJECTIVES}.get(part, ""))
        lines = {"noun": INDEX, "adj": "open a 1 1 ! 1 1 00000500\nclosed a 1 1 ! 1 1 00000600\n"}
        (wordnet / f"index.{part}").write_text("  1 licence\n" + lines.get(part, ""))
    (wordnet / "cntlist.rev").write_text("thing%1:03:00:: 1 7\nopen%3:00:00:: 1 40\n")
    return books, wordnet


@pytest.fixture(scope="module")
def knowledge(folders: tuple[Path, Path], request: pytest.FixtureRequest) -> Knowledge:
    """Read from the tiny folders; Python's docstrings are those of one module."""
    from openk3.data import pocket_mix
    from openk3.data.local_text import Corpus, TextFile

    text = 'def add(a, b):\n    """Return the sum of both numbers."""\n'
    patch = pytest.MonkeyPatch()
    patch.setattr(pocket_mix, "gather", lambda: Corpus("here", (TextFile("sums.py", text, len(text)),), ()))
    request.addfinalizer(patch.undo)
    return Knowledge.read(*folders)


def test_wordnet_is_read(folders: tuple[Path, Path]) -> None:
    """Meanings, examples, words alike and opposite; markers go, unfit words too."""
    senses = {sense.word: sense for sense in read_wordnet(folders[1])}
    assert senses["thing"].meaning == "what is there" and senses["thing"].example == "a thing of beauty"
    assert senses["thing"].alike == ("stuff",) and senses["thing"].tagged == 7
    assert senses["open"].opposite == "closed" and senses["closed"].opposite == "open"
    assert senses["Testburg"].is_name and senses["Testburg"].kind == "thing"
    assert "rudeword" not in senses
    assert Word.of([senses["open"]]).meaning == "open (adjective): not closed."


def test_facts_come_from_glosses(folders: tuple[Path, Path]) -> None:
    """Capitals by their first name, elements with number and symbol."""
    answers = [fact.answer for sense in read_wordnet(folders[1]) for fact in fact_exchanges(sense.word, [sense])]
    assert answers == [
        "The capital of Testland is Testburg.",
        "The atomic number of testium is 200.",
        "The symbol of testium is Tt.",
        "Tt is testium.",
    ]


def test_files_that_are_not_wordnets_are_named(tmp_path: Path) -> None:
    """Missing and broken ones."""
    with pytest.raises(DataError, match=r"data\.noun: no such file"):
        read_wordnet(tmp_path)
    (tmp_path / "data.noun").write_text("a b\n")
    (tmp_path / "index.noun").write_text("")
    with pytest.raises(DataError, match=r"are not WordNet's"):
        read_wordnet(tmp_path)


def test_books_are_plain_paragraphs(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Tags, typographic quotes and front matter go; tales are the articles of the right length."""
    chapters = read_chapters(folders[0])
    assert len(chapters) == 10 and {chapter.book for chapter in chapters} == {"tales"}
    (fables,) = (chapter for chapter in chapters if chapter.name == "fables")
    assert fables.text.startswith("The Fox\n\nA fox said") and '"Yes",\nit said.' in fables.text
    assert [tale.title for tale in read_tales(folders[0])] == ["The Fox"]
    with pytest.raises(DataError, match="no books"):
        read_chapters(tmp_path)


def test_sums_are_right() -> None:
    """Each `a op b = c` in answers and thoughts, worked out again."""
    rng, checked = random.Random(0), 0
    for _ in range(2000):
        made = drills.drill(rng, WORDS)
        for left, right in re.findall(r"(-?\d+(?: [+*-] -?\d+)+) = (-?\d+)", f"{made.reasoning} {made.answer}"):
            assert eval(left) == int(right), made
            checked += 1
        if match := re.fullmatch(r"(\d+) / (\d+) = (\d+)(?: remainder (\d+))?", made.answer):
            a, b, whole, rest = (int(n or 0) for n in match.groups())
            assert a == b * whole + rest and rest < b
        if match := re.fullmatch(r"The letter (.) occurs (\d+) times? in (\w+)\.", made.answer):
            assert match[3].count(match[1]) == int(match[2])
    assert checked > 2000


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (21, "twenty-one"), (100, "one hundred"), (1214, "one thousand two hundred and fourteen"),
     (3005, "three thousand and five"), (90_000, "ninety thousand")],
)  # fmt: skip
def test_numbers_in_words(number: int, words: str) -> None:
    """British English, up to a million."""
    assert drills.in_words(number) == words


def test_pictures_are_described_by_what_was_drawn() -> None:
    """Every kind occurs, the same for the same number, and colours in answers are the picture's."""
    asked = set()
    for number in range(120):
        shown, again = picture(3, number, WORDS), picture(3, number, WORDS)
        assert shown.exchanges == again.exchanges and shown.image.tobytes() == again.image.tobytes()
        assert shown.image.width % 28 == 0 and shown.image.height % 28 == 0
        asked |= {exchange.question for exchange in shown.exchanges}
    for kind in ("dots", "square?", "shape", "values of the bars", "values of the points", "larger", "text"):
        assert any(kind in question for question in asked), kind


def test_records_can_be_trained_on(knowledge: Knowledge) -> None:
    """Conversations, pictures and chapters are sound records, and the same for the same seed."""
    talks = list(talk_records(knowledge, 5, 1, 40))
    assert talks == list(talk_records(knowledge, 5, 1, 40)) != list(talk_records(knowledge, 6, 1, 40))
    seen = list(picture_records(knowledge, 5, 0, 30))
    for record in [*talks, *seen, *book_records(knowledge)]:
        check_record(Record(record, "here"))
    assert any("image" in record for record in seen) and any("messages" in record for record in seen)
    assert {record["thinking"] for record in talks} == {True, False}
    held_out = [record["text"] for record in book_records(knowledge, held_out=True)]
    assert len(held_out) == 1 and held_out[0] not in [record["text"] for record in book_records(knowledge)]


def test_every_topic_comes_up(knowledge: Knowledge) -> None:
    """Words, Python, tales, facts, itself, and what it does not know."""
    rng = random.Random(1)
    answers = {exchange(knowledge, rng).answer for _ in range(3000)}
    for part in ("(noun): what is there", "Return the sum", "The Fox\n\n", "of Testland is", about_pocket.I_CAN):
        assert any(part in answer for answer in answers), part
    assert about_pocket.I_DO_NOT_KNOW in answers


def test_shards_do_not_depend_on_the_number_of_processes(knowledge: Knowledge, tmp_path: Path) -> None:
    """Books, held-out text, conversations and pictures; digits are tokens by themselves."""
    learnt = Tokenizer.train(itertools.islice(tokenizer_texts(knowledge), 60), 700)
    assert len(learnt.encode("2024")) == 4
    for workers in (1, 2):
        out, amounts = tmp_path / str(workers), Amounts(talks=6, pictures=4, parts=2)
        written = dict(Shards(out, knowledge, learnt, pocket.model().vision, amounts).write(workers))
        assert set(written) == {"books-00", "held_out-00", "pictures-00", "pictures-01", "talk-00", "talk-01"}
    for kind in ("books", "held_out", "talk", "pictures"):
        one, two = (open_source(tmp_path / str(workers) / kind, learnt) for workers in (1, 2))
        assert len(one) == len(two) > 0 and one.fingerprint() == two.fingerprint()
