"""Questions and answers come from the docstrings themselves, and render into closed XTML channels with a loss."""

from __future__ import annotations

import pytest

from openk3.data.docstring_chat import MAX_ANSWER, Exchange, conversations, exchanges
from openk3.data.documents import Encoder, Record
from openk3.data.local_text import TextFile, gather
from openk3.inputs.tokenizer import Tokenizer

SOURCE = '''"""Tools for cutting wood.

More about wood.
"""
import os

def saw(board, *, width=3):
    """Cut the board into strips
    of one width.

    The rest is dust.
    """
    def inner():
        """Never asked about."""

def _hidden():
    """Not part of the module's face."""

def bare(x): return x

class Lathe:
    """Turns a log into a bowl."""

    async def spin(self, speed: int = 10) -> None:
        """Start the motor slowly."""
'''


def file(text: str, name: str = "wood/tools.py") -> TextFile:
    return TextFile(name, text, len(text.encode()))


def test_every_public_docstring_gives_its_questions():
    assert exchanges(file(SOURCE)) == [
        Exchange("What is the module `wood.tools` for?", "`wood.tools` is a module.", "Tools for cutting wood."),
        Exchange(
            "What does `wood.tools.saw` do?",
            "`wood.tools.saw` is a function in `wood.tools`.",
            "Cut the board into strips of one width.",
        ),
        Exchange(
            "How is `wood.tools.saw` called?",
            "`wood.tools.saw` is a function in `wood.tools`.",
            "`saw(board, *, width=3)`",
        ),
        Exchange(
            "What is `wood.tools.Lathe`?", "`wood.tools.Lathe` is a class in `wood.tools`.", "Turns a log into a bowl."
        ),
        Exchange(
            "What does `wood.tools.Lathe.spin` do?",
            "`wood.tools.Lathe.spin` is a function in `wood.tools.Lathe`.",
            "Start the motor slowly.",
        ),
        Exchange(
            "How is `wood.tools.Lathe.spin` called?",
            "`wood.tools.Lathe.spin` is a function in `wood.tools.Lathe`.",
            "`spin(self, speed: int=10)`",
        ),
    ]


def test_packages_and_pieces_of_files_are_named_as_imported():
    assert "`wood`" in exchanges(file(SOURCE, "wood/__init__.py"))[0].question
    assert "`wood.tools`" in exchanges(file(SOURCE, "wood/tools.py#0003"))[0].question


@pytest.mark.parametrize("text", ["def f(:", "x = 1", "\0", "(" * 5000, '"""One\\d two three."""\ndef broken('])
def test_what_does_not_parse_or_says_nothing_is_passed_over(text):
    assert exchanges(file(text)) == []


def test_other_languages_have_no_docstrings():
    assert exchanges(file(SOURCE, "notes.txt")) == []


def test_long_answers_end_with_a_sentence_or_are_left_out():
    long = f'"""First sentence here. {"word " * 100}"""'
    assert exchanges(file(long))[0].answer == "First sentence here."
    assert exchanges(file(f'"""{"word " * 100}"""')) == []


def test_every_exchange_is_used_once_in_alternating_turns():
    files = [file(SOURCE, f"wood/part{i}.py") for i in range(60)]
    records = list(conversations(files, seed=1))
    assert records == list(conversations(files, seed=1)) != list(conversations(files, seed=2))
    asked = []
    for record in records:
        roles = [m["role"] for m in record["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and 1 <= len(roles) // 2 <= 4
        asked += [m["content"] for m in record["messages"][::2]]
        for message in record["messages"][1::2]:
            assert ("reasoning_content" in message) == record["thinking"]
            assert ("effort" in record) == record["thinking"]
            assert len(message["content"]) <= MAX_ANSWER + 2
    assert sorted(asked) == sorted(e.question for f in files for e in exchanges(f))
    modes = {(r["thinking"], r.get("effort")) for r in records}
    assert modes == {(True, "max"), (True, "high"), (True, "low"), (False, None)}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([SOURCE] * 3, 640)


def test_records_render_with_loss_on_the_assistant_until_it_ends_its_message(tokenizer):
    encoder = Encoder(tokenizer)
    for record in conversations([file(SOURCE)], seed=5):
        document = encoder.encode(Record(record, "chat"))
        ids, targets = document.ids.tolist(), document.targets.tolist()
        end = tokenizer.special["<|end_of_msg|>"]
        assert ids[-1] == end and targets[-1]
        scored = tokenizer.decode([i for i, t in zip(ids, targets) if t])
        for message in record["messages"]:
            assert (message["content"] in scored) == (message["role"] == "assistant")
        answers = len(record["messages"]) // 2
        assert scored.count("<|end_of_msg|>") == answers
        assert scored.count("<|close|>think<|sep|>") == (answers if record["thinking"] else 0)
        assert scored.count("<|close|>response<|sep|>") == answers
        assert not targets[0]


def test_the_standard_library_gives_thousands_and_held_out_files_none():
    corpus = gather(max_bytes=3_000_000)
    records = list(conversations(corpus.train))
    assert sum(len(r["messages"]) // 2 for r in records) > 1000
    asked = "\n".join(m["content"] for r in records for m in r["messages"])
    for held_out in corpus.held_out:
        for exchange in exchanges(held_out):
            assert exchange.question not in asked
