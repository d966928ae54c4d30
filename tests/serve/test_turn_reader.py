"""TurnReader: broken markup is recovered the same streamed and whole, and tokens keep their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import BYTES, CLOSE, END, OPEN, SEP, turn

from openk3.engine.request import Token
from openk3.inputs.chat import Parser
from openk3.serve.turn_reader import Delta, TextReader, TurnReader
from openk3.serve.turns import calls_of, merged, text_of

CALLS = [("get", [("city", "string", '"Zü" <|x & y'), ("n", "number", "1e2")]), ("put", [])]
GOLDEN = turn("答え👩‍👩‍👧 is\n42", "why ď", CALLS)
CALL = (
    f'{OPEN}call tool="f" index="1"{SEP}{OPEN}argument key="a" type="number"{SEP}7{CLOSE}argument{SEP}{CLOSE}call{SEP}'
)


def tokens(text: str) -> list[Token]:
    """With a log-probability that names the place."""
    return [Token(token, -float(place)) for place, token in enumerate(BYTES.encode_control(text))]


def read(pieces: Sequence[Sequence[Token]], channel: str = "think", stops: Sequence[str] = ()) -> list[Delta]:
    """All deltas, without ids, which differ from reader to reader."""
    reader = TurnReader(BYTES, channel, stops, keeps_logprobs=True)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
    return [delta._replace(call_id="") for delta in merged(deltas)]


def told(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls."""
    calls = [(name, arguments) for _, name, arguments in calls_of(deltas)]
    return text_of(deltas, "reasoning"), text_of(deltas, "content"), calls


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f"why{OPEN}tools{SEP}{CALL}{CLOSE}tools{SEP}{END}", ("why", "", [("f", '{"a": 7}')])),
        (
            f"why{OPEN}response{SEP}yes{CLOSE}response{SEP}{OPEN}tools{SEP}{CALL}{END}",
            ("why", "yes", [("f", '{"a": 7}')]),
        ),
        (f"why{CLOSE}think{OPEN}response{SEP}yes{END}", ("why", "yes", [])),
        (f"why{CLOSE}response{SEP}yes{END}", ("why", "yes", [])),
        (f"why{OPEN}tools{SEP}{CALL}", ("why", "", [("f", '{"a": 7}')])),
        (
            f'why{OPEN}call tool="f" index="1"{SEP}{OPEN}argument key="a" type="string"{SEP}x',
            ("why", "", [("f", '{"a": "x"}')]),
        ),
        (f'why{OPEN}call index="1"{SEP}{CLOSE}call{SEP}{CALL}', ("why", "", [("f", '{"a": 7}')])),
    ],
)
def test_think_channels_that_are_not_closed(text: str, want: tuple[str, str, list[tuple[str, str]]]) -> None:
    """P01: calls are there, reasoning holds the prose alone, markers nowhere; a call without a name is dropped."""
    whole = read([tokens(text)])
    assert told(whole) == want and whole == read([[token] for token in tokens(text)])
    reader = TurnReader(BYTES, "think")
    reader.feed(tokens(text))
    reader.finish()
    assert reader.finish_reason("stop") == ("tool_calls" if want[2] else "stop")


def test_every_cut_of_a_golden_answer() -> None:
    """P03: at every token, each token alone, and at once; reasoning before content, indices in order."""
    sequence = tokens(GOLDEN)
    whole = read([sequence])
    arguments = '{"city": "\\"Zü\\" <|x & y", "n": 1e2}'
    assert told(whole) == ("why ď", "答え👩‍👩‍👧 is\n42", [("get", arguments), ("put", "{}")])
    assert [delta.index for delta in whole if delta.kind == "call"] == [0, 1]
    assert read([[token] for token in sequence]) == whole
    for place in range(len(sequence)):
        assert read([sequence[:place], sequence[place:]]) == whole


PIECES = (OPEN, CLOSE, SEP, END, "think", "response", "tools", "message", ' key="a" type="number"', "argument", "json")
WORDS = st.lists(st.sampled_from([*PIECES, 'call tool="f" index="1"', "7", " ", "é👋", '"', "own", "fox"]), max_size=30)


@settings(max_examples=200)
@given(WORDS, st.sampled_from(["think", "response"]), st.sampled_from([(), ("own fox",), ("n", "7 ")]), st.randoms())
def test_any_garbage_is_read_the_same_streamed_and_whole(
    words: list[str], channel: str, stops: tuple[str, ...], random
) -> None:
    """P01, P03: joined deltas equal the whole, equal the parser's message, and hold neither markers nor stops."""
    sequence = tokens("".join(words))
    cuts = sorted(random.sample(range(len(sequence) + 1), min(2, len(sequence) + 1)))
    pieces = [sequence[a:b] for a, b in zip([0, *cuts], [*cuts, len(sequence)])]
    whole = read([sequence], channel, stops)
    assert read(pieces, channel, stops) == read([[token] for token in sequence], channel, stops) == whole
    reasoning, content, calls = told(whole)
    assert not any(mark in reasoning + content for mark in (OPEN, CLOSE, SEP, END))
    assert not any(stop in content for stop in stops)
    if not stops:
        parser = Parser(channel, tokenizer=BYTES)
        parser.feed_ids(token.id for token in sequence)
        parser.finish()
        message = parser.message()
        named = [c["function"] for c in message.get("tool_calls", []) if c["function"]["name"]]
        assert (reasoning, content) == (message.get("reasoning_content", ""), message["content"])
        assert calls == [(call["name"], call["arguments"]) for call in named]


def test_stops_count_in_content_alone() -> None:
    """A04: a stop in reasoning or in arguments changes nothing; in content it ends the turn, calls behind it too."""
    text = turn("one own fox two", "own fox", [("f", [("a", "string", "own fox")])])
    deltas = read([tokens(text)], stops=["own fox"])
    assert told(deltas) == ("own fox", "one ", [])
    assert told(read([tokens(text)], stops=["fox own"])) == ("own fox", "one own fox two", [("f", '{"a": "own fox"}')])


def test_log_probabilities_go_with_the_content() -> None:
    """Of tokens whose text begins in the content that was told; bytes of one character all belong to it."""
    text = turn("aé!own", "no")
    first = len(BYTES.encode_control(turn("", "no").partition(f"{CLOSE}response")[0]))
    deltas = read([[token] for token in tokens(text)], stops=["own"])
    assert text_of(deltas, "content") == "aé!"
    kept = [token for delta in deltas for token in delta.logprobs]
    assert [token.logprob for token in kept] == [-float(first + n) for n in range(4)]
    assert b"".join(BYTES.decode_bytes([token.id]) for token in kept) == "aé!".encode()


def test_plain_text_is_cut_by_stops_and_keeps_no_control_token() -> None:
    """A05: characters come whole; one that is cut short is one U+FFFD."""
    reader = TextReader(BYTES, ["ww"])
    deltas = [reader.feed([token]) for token in tokens(f"né{SEP}w")] + [reader.finish()]
    assert "".join(delta.text for delta in deltas) == "néw"
    assert [len(delta.logprobs) for delta in deltas] == [1, 0, 2, 0, 0, 2] and reader.finish_reason(
        "length"
    ) == "length"
    cut = TextReader(BYTES)
    assert cut.feed(tokens("né")[:-1]).text + cut.finish().text == "n\ufffd"
