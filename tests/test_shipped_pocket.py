"""The model that comes with the package: its files, what it answers to the letter, and who uses it when."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from openk3.cli import main
from openk3.commands.runs import SHIPPED
from openk3.config.model import ModelConfig
from openk3.data.picture_talk import picture
from openk3.inputs.chat import encode_chat, render
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.generate import generate
from openk3.model.k3 import K3
from openk3.recipes import pocket

MB = 1_000_000
DIGESTS = {
    "model-00001-of-00002.safetensors": "d18a9d7738bdfe5359b1dec2bef913d5d6138362ab29d9b69a098036da264cae",
    "model-00002-of-00002.safetensors": "73d0e5a90faeeda83d3fd648e39a2e56cad40975d9e94578f30624fd770d8773",
    "tiktoken.model": "252a5836cd73468607234803da12ee07ca465434e9a8fb723f017bb2a36a2881",
}
# Question, effort (None: it answers directly), the tokens of the most likely answer, and what they say.
GOLDEN: tuple[tuple[str, str | None, list[int], str], ...] = (
    (
        "What does happy mean?",
        "max",
        [307, 385, 279, 258, 338, 58, 1967, 44, 711, 46, 3844, 415, 611, 3845, 3843, 268, 830, 280, 325, 3845, 267, 395]
        + [121, 333, 591, 350, 2667, 275, 352, 3254, 352, 2893, 392, 2656, 352, 3372, 46, 3844, 268, 830, 280, 325]
        + [3845, 3844, 109, 1882, 3845, 3842],
        "happy (adjective): enjoying or showing or marked by joy or pleasure.",
    ),
    (
        "What is 47 + 38?",
        "low",
        [55, 405, 32, 56, 349, 32, 49, 53, 44, 450, 32, 53, 44, 766, 32, 49, 3844, 415, 611, 3845, 3843, 268, 830, 280]
        + [325, 3845, 52, 55, 405, 32, 51, 56, 349, 32, 56, 53, 3844, 268, 830, 280, 325, 3845, 3844, 109, 1882, 3845]
        + [3842],
        "47 + 38 = 85",
    ),
    (
        "What is the capital of France?",
        None,
        [307, 747, 279, 518, 2864, 299, 457, 287, 270, 46, 3844, 268, 830, 280, 325, 3845, 3844, 109, 1882, 3845, 3842],
        "The capital of France is Paris.",
    ),
)


@pytest.fixture(autouse=True)
def without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In an empty folder, where no name can be looked up and nothing be connected to."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def model() -> K3:
    """The model in float32 on the CPU."""
    return K3.from_pretrained(SHIPPED, dtype=torch.float32, device="cpu")


def test_files_are_few_and_small() -> None:
    """At most 25 MB in all and 15 MB each; weights as safetensors alone, with card, curve and the notice of WordNet."""
    sizes = {path.name: path.stat().st_size for path in SHIPPED.iterdir()}
    assert sum(sizes.values()) <= 25 * MB and max(sizes.values()) <= 15 * MB
    assert {name for name in sizes if sizes[name] > MB} == {name for name in DIGESTS if name.endswith(".safetensors")}
    assert {"README.md", "curve.svg", "LICENSE.WordNet", "config.json", "generation_config.json"} <= set(sizes)


@pytest.mark.parametrize("name", DIGESTS)
def test_files_are_the_trained_ones(name: str) -> None:
    """By digest: what was measured is what is shipped."""
    assert hashlib.sha256((SHIPPED / name).read_bytes()).hexdigest() == DIGESTS[name]


def test_shape_is_the_recipes_and_experts_are_packed() -> None:
    """So that `openk3 pretrain pocket` makes another one; every expert's matrix lies there as MXFP4."""
    config = ModelConfig.from_json(SHIPPED)
    assert (config.text, config.vision) == (pocket.model().text, pocket.model().vision)
    names = json.loads((SHIPPED / "model.safetensors.index.json").read_text())["weight_map"]
    experts = [name for name in names if ".experts." in name]
    assert len([name for name in experts if name.endswith("weight_packed")]) == 8 * 42 * 3
    assert all(name.endswith(("weight_packed", "weight_scale")) for name in experts)
    assert len(Tokenizer.load(SHIPPED).special) == 256


@pytest.mark.parametrize(("question", "effort", "tokens", "said"), GOLDEN)
def test_greedy_answers_to_the_token(
    model: K3, question: str, effort: str | None, tokens: list[int], said: str
) -> None:
    """The two largest logits were at least 2 apart at each of these positions."""
    tokenizer = Tokenizer.load(SHIPPED)
    segments = render([{"role": "user", "content": question}], thinking=effort is not None, effort=effort)
    ids, _ = encode_chat(tokenizer, segments)
    stop = (tokenizer.special["<|end_of_msg|>"],)
    assert list(generate(model, ids, max_tokens=80, temperature=0.0, stop_ids=stop)) == tokens
    assert said in tokenizer.decode(tokens)


def test_chat_uses_it_where_there_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One question by the command line, in a folder without runs."""
    assert main(["chat", "--message", "What is the opposite of hot?", "--effort", "off", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip() == "The opposite of hot is cold."


def test_chat_sees_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A drawn one that training never showed, from another series."""
    shown = picture(1000, 11, ("garden",))
    shown.image.save(tmp_path / "shape.png")
    answers = {exchange.question: exchange.answer for exchange in shown.exchanges}
    flags = ["--image", "shape.png", "--effort", "off", "--temperature", "0"]
    for question in ("What colour is the triangle?", "Where is the triangle?"):
        assert main(["chat", "--message", question, *flags]) == 0
        assert capsys.readouterr().out.strip() == answers[question]


def test_server_uses_it_where_there_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line says what it is; then it answers under its name, most likely tokens first, and ends."""
    monkeypatch.undo()  # a client on loopback
    command = [sys.executable, "-m", "openk3", "serve", "--port", "0", "--cache-gib", "0.05"]
    environment = {**os.environ, "PYTHONPATH": str(SHIPPED.parents[2])}
    process = subprocess.Popen(command, cwd=SHIPPED, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        about, line = process.stderr.readline(), process.stderr.readline()
        assert "it makes mistakes" in about and line.startswith("pocket at "), about + line + process.stderr.read()
        body = {"model": "pocket", "messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0}
        answer = httpx.post(f"{line.split()[-1]}/chat/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["message"]["content"] == "47 + 38 = 85"
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_help_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each command that uses it."""
    for command in ("chat", "generate", "serve"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "pocket" in capsys.readouterr().out
