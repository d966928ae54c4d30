"""`openk3 chat`: a scripted terminal session, images, stopping an answer, and nothing that steers the terminal."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from openk3.cli import main
from openk3.commands import chat
from openk3.commands.errors import UserError
from openk3.commands.flags import Chat
from openk3.inputs.images import MediaConfig
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3


@pytest.fixture
def conversation(tiny_run: Path) -> chat.Conversation:
    """A conversation with the tiny model."""
    directory = tiny_run / "model"
    model, tokenizer = K3.from_pretrained(directory), Tokenizer.load(directory)
    return chat.Conversation(model, tokenizer, MediaConfig(), Chat(max_tokens=6, seed=3))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A small picture whose name has a space."""
    path = tmp_path / "a picture.png"
    Image.fromarray(np.arange(56 * 84 * 3, dtype=np.uint32).astype(np.uint8).reshape(56, 84, 3)).save(path)
    return path


def script(monkeypatch: pytest.MonkeyPatch, conversation: chat.Conversation, text: str) -> None:
    """Let the model answer `text` instead of what it would say."""
    ids = conversation.tokenizer.encode_control(text)
    monkeypatch.setattr(chat, "generate", lambda *args, **kwargs: iter(ids))


ANSWER = (
    "why<|close|>think<|sep|><|open|>response<|sep|>because<|close|>response<|sep|>"
    "<|close|>message<|sep|><|end_of_msg|>"
)


def test_channels_become_reasoning_and_answer(
    conversation: chat.Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The markup is not shown, and the message joins the conversation."""
    script(monkeypatch, conversation, ANSWER)
    chat.answer(conversation, "so?")
    assert capsys.readouterr().out == "why\nbecause\n"
    assert conversation.messages == [
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "because", "reasoning_content": "why"},
    ]


def test_reasoning_is_dimmed_on_a_terminal(
    conversation: chat.Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the colour is always switched off again."""
    script(monkeypatch, conversation, ANSWER)
    monkeypatch.setattr("openk3.commands.terminal.is_coloured", lambda: True)
    chat.answer(conversation, "so?")
    assert capsys.readouterr().out == f"{chat.DIM}why\n{chat.PLAIN}because{chat.PLAIN}\n"


def test_interrupt_stops_the_answer_and_keeps_what_was_said(
    conversation: chat.Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, then the next question works as usual."""

    def until_interrupted(*args: Any, **kwargs: Any) -> Iterator[int]:
        yield from conversation.tokenizer.encode("half an")
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "generate", until_interrupted)
    chat.answer(conversation, "so?")
    assert capsys.readouterr().out == "half an (stopped)\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "", "reasoning_content": "half an"}
    script(monkeypatch, conversation, ANSWER)
    chat.answer(conversation, "and now?")
    assert len(conversation.messages) == 4


def test_an_error_inside_an_answer_leaves_the_terminal_plain(
    conversation: chat.Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also SIGTERM, which is one."""

    def stopped(*args: Any, **kwargs: Any) -> Iterator[int]:
        yield from conversation.tokenizer.encode("half")
        raise SystemExit(143)

    monkeypatch.setattr("openk3.commands.terminal.is_coloured", lambda: True)
    monkeypatch.setattr(chat, "generate", stopped)
    with pytest.raises(SystemExit):
        chat.answer(conversation, "so?")
    assert capsys.readouterr().out == f"{chat.DIM}half{chat.PLAIN}"


def test_session_from_standard_input(
    tiny_run: Path, picture: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command, a broken one, a missing image, and questions between them; /exit ends the session."""
    lines = ["/help", "hello", f"/image {picture}", "/image gone.png", "what is this?", "/effort off", "again"]
    lines += ["/effort loud", "/dance", "", "/reset", "/exit", "never asked"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", str(tiny_run), "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert "84x56 pixels, 6 tokens" in out and "gone.png: no such file" in out
    assert "effort off" in out and "/effort loud: not understood" in out and "/dance: not understood" in out
    assert out.count(chat.HELP) == 3 and out.endswith("forgotten\n") and err == ""


def test_one_question_with_an_image(tiny_run: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts: the same seed gives the same answer."""
    words = ["chat", str(tiny_run), "--message", "what?", "--image", str(picture), "--max-tokens", "4", "--seed", "5"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == first


def test_images_reach_the_model_in_order(conversation: chat.Conversation, picture: Path, monkeypatch: Any) -> None:
    """One placeholder per image in the prompt; earlier images stay in the conversation."""
    seen: list[Any] = []
    monkeypatch.setattr(chat, "generate", lambda model, packed, **kwargs: seen.append(packed) or iter(()))
    for question in ("first", "second"):
        conversation.attach(picture)
        list(conversation.ask(question))
    placeholder = conversation.model.config.media_placeholder_token_id
    counts = [(len(packed.images), int((packed.token_ids_T == placeholder).sum())) for packed in seen]
    assert counts == [(1, 1), (2, 2)]
    assert seen[1].images[0].grid_thw == (1, 4, 6)


def test_missing_image_flag_is_an_error(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any answer."""
    assert main(["chat", str(tiny_run), "--message", "x", "--image", "gone.png"]) == 2
    assert "gone.png" in capsys.readouterr().err


def test_longer_conversation_extends_the_prompt(conversation: chat.Conversation, monkeypatch: Any) -> None:
    """What was said is never tokenised differently later."""
    prompts: list[list[int]] = []
    ids = conversation.tokenizer.encode_control(ANSWER)

    def remember(model: K3, packed: Any, **kwargs: Any) -> Iterator[int]:
        prompts.append(packed.token_ids_T.tolist())
        return iter(ids)

    monkeypatch.setattr(chat, "generate", remember)
    for question in ("one", "two"):
        list(conversation.ask(question))
    said = prompts[0] + ids
    assert prompts[1][: len(said)] == said


def test_prompt_reads_lines_until_the_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-D leaves, and so does Ctrl-C at the prompt."""
    for end in (EOFError, KeyboardInterrupt):
        answers = iter(["a", end()])

        def read(prompt: str, answers: Iterator[Any] = answers) -> str:
            answer = next(answers)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr("builtins.input", read)
        assert list(chat.read_lines(interactive=True)) == ["a"]


def test_a_conversation_that_outgrew_the_context_says_so(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The question is not asked and not kept; /reset makes room, and the answer stops where the context ends."""
    directory = tiny_run / "model"
    model, tokenizer = K3.from_pretrained(directory), Tokenizer.load(directory)
    model.config = model.config.replace_text(max_position_embeddings=400)
    small = chat.Conversation(model, tokenizer, MediaConfig(), Chat(max_tokens=1000))
    seen: list[int] = []
    monkeypatch.setattr(chat, "generate", lambda model, packed, *, max_tokens, **_: seen.append(max_tokens) or iter(()))
    list(small.ask("short"))
    assert 0 < seen[0] < 400 and len(small.messages) == 2
    with pytest.raises(UserError, match="the conversation .*/reset.* tokens, and the model's context holds 400"):
        list(small.ask("long " * 400))
    assert len(small.messages) == 2 and len(seen) == 1
    small.reset()
    list(small.ask("short"))
    assert seen[1] == seen[0]
    monkeypatch.setattr("sys.stdin", io.StringIO("long " * 5000))
    assert main(["chat", str(tiny_run), "--max-tokens", "3"]) == 2
    assert "make it shorter" in capsys.readouterr().err


def test_what_a_model_writes_can_be_shown_to_it_again(
    conversation: chat.Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without a name does not end the conversation at the next question."""
    calls = '<|open|>tools<|sep|><|open|>call tool="" index="1"<|sep|><|close|>call<|sep|>'
    script(monkeypatch, conversation, calls + '<|open|>call tool="f" index="2"<|sep|><|close|>call<|sep|>')
    list(conversation.ask("one"))
    assert [call["function"]["name"] for call in conversation.messages[-1]["tool_calls"]] == ["f"]
    list(conversation.ask("two"))
    script(monkeypatch, conversation, calls)
    list(conversation.ask("three"))
    assert "tool_calls" not in conversation.messages[-1]
    list(conversation.ask("four"))


def test_an_image_of_any_shape_leaves_room(conversation: chat.Conversation, tmp_path: Path) -> None:
    """At most a quarter of the context, also for a thin one."""
    limit = conversation.model.config.text.max_position_embeddings // 4
    Image.new("1", (1, 200_000)).save(tmp_path / "thin.png")
    conversation.attach(tmp_path / "thin.png")
    _, (_, rows, columns) = conversation.images[-1]
    assert rows * columns // 4 <= limit


def test_image_settings_must_fit_the_model(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Patches of another size, or a file that is none, are said before any picture is read."""
    model = shutil.copytree(tiny_run / "model", tmp_path / "model")
    path = model / "preprocessor_config.json"
    path.write_text('{"media_proc_cfg": {"patch_size": 16}}')
    assert main(["chat", str(model), "--message", "x"]) == 2
    assert "patch_size: 16, but the model's is 14" in capsys.readouterr().err
    path.unlink()
    path.mkdir()
    assert main(["chat", str(model), "--message", "x"]) == 2
    assert "preprocessor_config.json: not an ordinary file" in capsys.readouterr().err
