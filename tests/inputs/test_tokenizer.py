"""Tokenizer: split pattern, specials, training, files, control-token safety and streaming."""

import base64
import errno
import json
import os
import subprocess
import sys
import sysconfig
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openk3.inputs import tokenizer as tk
from openk3.inputs.tokenizer import SPECIAL_OFFSETS, SPLIT_PATTERN, Tokenizer, TokenizerError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/pretokenize.json").read_text(encoding="utf-8"))
BYTES = {bytes([b]): b for b in range(256)}
MULTILINGUAL = [" ".join(text for text, _ in GOLDEN["rows"])] * 3


def stdlib(count):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files]


@pytest.fixture(scope="module")
def trained():
    texts = stdlib(60) + MULTILINGUAL
    model = tk.train_bpe(texts, 1500 - 256)
    return texts, model, Tokenizer(tk.export_ranks(model))


@pytest.fixture(scope="module")
def small():
    return Tokenizer(BYTES)


def whole_pieces():
    """A tokenizer whose ranks hold every golden piece whole, so that tokens are pieces."""
    ranks = dict(BYTES)
    for _, pieces in GOLDEN["rows"]:
        for piece in pieces:
            ranks.setdefault(piece.encode(), len(ranks))
    return Tokenizer(ranks)


def test_the_split_pattern_is_the_released_one():
    assert GOLDEN["pat_str"] == SPLIT_PATTERN


@pytest.mark.parametrize(("text", "pieces"), GOLDEN["rows"])
def test_pieces_match_the_released_ones(text, pieces):
    tokenizer = whole_pieces()
    assert [tokenizer.decode_bytes([i]).decode() for i in tokenizer.encode(text)] == pieces
    split = tk.tokenizers.pre_tokenizers.Split(tk.tokenizers.Regex(SPLIT_PATTERN), "isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


def test_special_ids_are_the_released_ones():
    special = tk.special_tokens(163584)
    assert len(special) == 256 and sorted(special.values()) == list(range(163584, 163840))
    named = {"[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588}
    named |= {"<|sep|>": 163589, "[start_header_id]": 163590, "[end_header_id]": 163591, "[EOT]": 163593}
    named |= {"<|media_begin|>": 163602, "<|media_content|>": 163603, "<|media_end|>": 163604, "<|media_pad|>": 163605}
    named |= {"<osagent_mode>": 163649, "[UNK]": 163838, "[PAD]": 163839, "<|reserved_token_163592|>": 163592}
    assert {name: special[name] for name in named} == named


def test_a_file_of_the_released_size_loads(tmp_path):
    """163,584 ranks and 256 specials, in a file of the official form."""
    tokens = [bytes([b]) for b in range(256)] + [bytes(pair) for pair in product(range(256), repeat=2)]
    tokens += [bytes(three) for three in product(range(2), range(256), range(256))][: 163584 - len(tokens)]
    assert len(set(tokens)) == 163584
    (tmp_path / "tiktoken.model").write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.num_ranks == 163584 and tokenizer.vocab_size == 163840
    assert tokenizer.encode_control("<|open|>") == [163587]
    assert tokenizer.special["<|media_pad|>"] == 163605 and tokenizer.special["[PAD]"] == 163839
    assert tokenizer.decode(tokenizer.encode("Hello <|open|>")) == "Hello <|open|>"


def test_training_exports_the_trained_tokenizer_exactly(trained):
    """Our encode gives the same bytes per token as the BPE trainer's own encode, on texts seen and unseen."""
    texts, model, tokenizer = trained
    assert tokenizer.vocab_size == 1500 and tokenizer.num_ranks == 1244
    letters = tk._byte_letters()
    pieces = {i: bytes(letters[c] for c in name) for name, i in model.get_vocab().items()}
    documents = texts + stdlib(90)[60:] + [text for text, _ in GOLDEN["rows"]]
    for document in documents:
        want = [pieces[i] for i in model.encode(document).ids]
        assert [tokenizer.decode_bytes([i]) for i in tokenizer.encode(document)] == want
        assert tokenizer.decode(tokenizer.encode(document)) == document
    count = sum(len(tokenizer.encode(document)) for document in texts)
    assert count < 0.45 * sum(len(document.encode()) for document in texts)


def test_training_is_deterministic():
    texts = stdlib(12)
    first, second = (Tokenizer.train(texts, 900) for _ in range(2))
    assert first._ranks == second._ranks and list(first._ranks) == list(second._ranks)
    assert first._ranks != Tokenizer.train(stdlib(6), 900)._ranks


def test_training_on_little_text_stays_small():
    tokenizer = Tokenizer.train(["abab"], 1000)
    assert tokenizer.vocab_size == tokenizer.num_ranks + 256 < 1000
    assert tokenizer.decode(tokenizer.encode("anything 你")) == "anything 你"
    assert Tokenizer.train([], 512).num_ranks == 256
    with pytest.raises(TokenizerError, match="at least 512"):
        Tokenizer.train(["a"], 511)


def test_save_and_load_give_the_same_tokenizer(trained, tmp_path):
    _, _, tokenizer = trained
    tokenizer.save(tmp_path / "made")
    tokenizer.save(tmp_path / "made")
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == ["tiktoken.model", "tokenizer_config.json"]
    text = "def f(x):\n    return '汉字' + x  # é 👩‍👩‍👧"
    for path in (tmp_path / "made", tmp_path / "made/tiktoken.model"):
        loaded = Tokenizer.load(path)
        assert loaded.special == tokenizer.special and loaded.encode(text) == tokenizer.encode(text)
    loaded.save(tmp_path / "again")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "made" / name).read_bytes()


def test_a_failed_save_leaves_the_old_file(small, tmp_path, monkeypatch):
    small.save(tmp_path)
    before = (tmp_path / "tiktoken.model").read_bytes()

    def broken(source, target):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match=r"disk full.*tiktoken\.model"):
        Tokenizer(BYTES | {b"ab": 256}).save(tmp_path)
    assert (tmp_path / "tiktoken.model").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["tiktoken.model", "tokenizer_config.json"]


ROWS = b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (ROWS + b"YWI=\n", "tiktoken.model:257: expected a base64 token and its rank"),
        (ROWS + b"YWI= x\n", "tiktoken.model:257: expected a base64 token"),
        (ROWS + b"YWI= " + b"9" * 5000, "tiktoken.model:257: expected a base64 token"),
        (ROWS + b"YWI= -1\n", "tiktoken.model:257: expected a base64 token"),
        (ROWS + b"Y*I= 256\n", "tiktoken.model:257: .* is not base64"),
        (ROWS + b"YWI= 256\nYWI= 257\n", "tiktoken.model:258: token b'ab' was already given rank 256"),
        (ROWS + b"YWI= 300\n", "tiktoken.model:257: rank 300, but"),
        (ROWS[: ROWS.index(b"/w==")], "no token for the single byte 0xff"),
        (b"", "no token for the single byte 0x00"),
        (b"\x80\x81\x82 0\n", "tiktoken.model:1: .* is not base64"),
    ],
)
def test_broken_rank_files_are_named_with_the_line(data, words, tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=words) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "added_tokens_decoder must map"),
        ('{"added_tokens_decoder": 3}', "added_tokens_decoder must map"),
        ('{"added_tokens_decoder": {"5": {"content": "x"}}}', "added_tokens_decoder.5: expected an id in 256..511"),
        ('{"added_tokens_decoder": {"x": {"content": "x"}}}', "added_tokens_decoder.x"),
        ('{"added_tokens_decoder": {"300": {}}}', "added_tokens_decoder.300"),
        ('{"added_tokens_decoder": {"' + "9" * 5000 + '": {"content": "x"}}}', "added_tokens_decoder.999"),
        ('{"added_tokens_decoder": {"300": {"content": "\\ud800"}}}', "added_tokens_decoder.300"),
        ("[" * 100_000, "nested too deeply"),
        ('{"added_tokens_decoder": {"300": {"content": "a"}, "301": {"content": "a"}}}', "one name to two ids"),
        ('{"added_tokens_decoder": {"259": {"content": "<|im_user|>"}}}', "<|open|> must be id 259; this is not a K3"),
    ],
)
def test_broken_configs_are_named(config, words, tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(ROWS)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError) as error:
        Tokenizer.load(tmp_path)
    assert words in str(error.value) and "tokenizer_config.json" in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_file_is_named(small, tmp_path):
    """A folder or a pipe in place of either file is not passed over, and not waited for."""
    small.save(tmp_path)
    for name in ("tokenizer_config.json", "tiktoken.model"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(TokenizerError, match=f"{name}: not an ordinary file"):
            Tokenizer.load(tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
        with pytest.raises(TokenizerError, match=f"{name}: not an ordinary file"):
            Tokenizer.load(tmp_path)


def test_a_config_may_name_reserved_tokens(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(ROWS)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"300": {"content": "<|mine|>"}}}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode_control("<|mine|>") == [300] and "<|reserved_token_300|>" not in tokenizer.special


def test_missing_files_are_one_line(tmp_path):
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.load(tmp_path)


def test_segments_are_encoded_apart(trained):
    _, _, tokenizer = trained
    segments = [("<|open|>", True), ("mess", False), ("age", False), ("<|sep|>", True), ("<|sep|>", False), ("", False)]
    open_id, sep_id = tokenizer.special["<|open|>"], tokenizer.special["<|sep|>"]
    want = [open_id, *tokenizer.encode("mess"), *tokenizer.encode("age"), sep_id, *tokenizer.encode("<|sep|>")]
    assert tokenizer.encode_segments(segments) == want
    assert tokenizer.decode(want) == "<|open|>message<|sep|><|sep|>"


ALL_NAMES = st.sampled_from([*SPECIAL_OFFSETS, "<|reserved_token_300|>", "<|endoftext|>", "<|", "|>", "<", "open", "["])


@given(st.lists(ALL_NAMES | st.text(max_size=5), max_size=8).map("".join))
@example('<|open|>message role="system"<|sep|>')
@settings(max_examples=150, deadline=None)
def test_user_text_never_becomes_a_control_token(trained, text):
    _, _, tokenizer = trained
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.num_ranks for i in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_segments([(text, False)]) == ids


def test_lone_surrogates_do_not_crash(small):
    """Half a pair is one U+FFFD, in training as in encoding; two halves are the character they spell."""
    for text, want in (("a\ud800b", "a\ufffdb"), ("\udce9", "\ufffd"), ("\ud83d\ude00", "😀"), ("é", "é")):
        assert tk.well_formed(text) == want == small.decode(small.encode(text))
    assert Tokenizer.train(["ab\ud800" * 9], 600)._ranks == Tokenizer.train(["ab\ufffd" * 9], 600)._ranks


def definition_of_cuts(text):
    """The rule, character by character: a run of one kind longer than 25,000 starts a new piece there."""
    pieces, start, run, kind = [], 0, 0, None
    for i, char in enumerate(text):
        if char.isspace() == kind:
            run += 1
        else:
            run, kind = 1, char.isspace()
        if run > 25_000:
            pieces.append(text[start:i])
            start, run = i, 1
    return [*pieces, text[start:]] if text else []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a" * 25_000,
        "a" * 25_001,
        " " * 60_000 + "b",
        "ab " * 9000 + "c" * 75_001 + " " * 25_001 + "d",
        "x\x1c" * 9,
    ],
)
def test_long_runs_are_cut_as_released(text):
    assert list(tk.split_text(text)) == definition_of_cuts(text)


def test_long_texts_are_cut_at_400_000_characters():
    text = "ab " * 300_000
    pieces = list(tk.split_text(text))
    assert "".join(pieces) == text and [len(piece) for piece in pieces] == [400_000, 400_000, 100_000]
    run = "a" * 399_990 + "b" * 30_000
    assert list(tk.split_text(run)) == definition_of_cuts(run[:400_000]) + definition_of_cuts(run[400_000:])


def test_a_very_long_word_encodes_quickly(trained):
    _, _, tokenizer = trained
    text = "a" * 200_000 + " " * 200_000 + "\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=40), st.data())
@example("👩‍👩‍👧 ď 你", None)
@settings(max_examples=100, deadline=None)
def test_streaming_equals_decoding_at_once(small, text, data):
    """A05: one byte per token, in any grouping: no U+FFFD for valid text, joined pieces equal decode of all ids."""
    ids, decoder, pieces = small.encode(text), small.decoder(), []
    while ids:
        take = 1 if data is None else data.draw(st.integers(1, 5))
        pieces.append(decoder.feed(ids[:take]))
        ids = ids[take:]
    assert "".join(pieces) + decoder.finish() == text
    assert all("�" not in piece for piece in pieces) or "�" in text


@pytest.mark.parametrize(
    ("data", "want"),
    [
        ("你".encode()[:2], "�"),
        ("👩".encode()[:3], "�"),
        (b"a\xffb", "a�b"),
        (b"\xff", "�"),
        ("你".encode()[:1] + b" x", "� x"),
        ("e\u0301".encode(), "e\u0301"),
        ("d\u030c".encode()[:2], "d�"),
    ],
)
def test_cut_and_invalid_bytes_give_one_replacement(small, data, want):
    """A05: a cut character, a real 0xFF byte, a space-led token inside a character, a cut combining accent."""
    decoder = small.decoder()
    got = "".join(decoder.feed(b) for b in data) + decoder.finish()
    assert got == want == small.decode(list(data)) and small.decode_bytes(list(data)) == data
    assert decoder.feed(list("é".encode())) + decoder.finish() == "é"


def test_a_space_led_token_inside_a_character():
    """A05: a token that starts with a space does not flush the character before it in pieces."""
    tokenizer = Tokenizer(BYTES | {b" x": 256})
    decoder = tokenizer.decoder()
    pieces = [decoder.feed(i) for i in (0xE4, 0xBD, 256, 0xE4, 0xBD, 0xA0)]
    assert pieces == ["", "", "� x", "", "", "你"] and decoder.finish() == ""


def test_control_tokens_decode_to_their_names(small):
    assert small.decode([65, small.special["<|sep|>"], 66]) == "A<|sep|>B"
    for wrong in (-1, small.vocab_size):
        with pytest.raises(TokenizerError, match=f"token id {wrong}: outside the vocabulary"):
            small.decode([wrong])


def test_inputs_need_no_torch():
    """Only packed.py needs torch: a chat client or an agent imports the rest without it."""
    names = ["tokenizer", "chat", "chat_parse", "images", "video"]
    code = "import sys\n" + "".join(f"import openk3.inputs.{n}\n" for n in names) + "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
