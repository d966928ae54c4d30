"""`openk3 serve`: what it refuses before it loads anything, and a whole life from the greeting to SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import torch
from live_server import parse_events

from openk3.cli import main
from openk3.commands import flags
from openk3.commands.errors import UserError
from openk3.commands.serve import prepared, require_keys, server_config
from openk3.config.http import ServerConfig
from openk3.engine.engine import Engine
from openk3.serve.keys import Caller, Keys

ROOT = Path(__file__).resolve().parent.parent.parent


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command line is refused with."""
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_is_wrong_is_said_in_one_line(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded; a server that the network reaches needs keys."""
    monkeypatch.delenv("OPENK3_API_KEYS", raising=False)
    run = str(tiny_run)
    assert "OPENK3_API_KEYS, or --open" in refused(capsys, run, "--host", "0.0.0.0")
    assert "cannot be read" in refused(capsys, run, "--keys", str(tmp_path / "none"))
    assert "is no folder" in refused(capsys, run, "--image-folders", str(tmp_path / "none"))
    assert "port: must lie in" in refused(capsys, run, "--port", "99999")
    assert "cannot listen there" in refused(capsys, run, "--host", "203.0.113.1", "--open")
    assert "give --outer-gib too" in refused(capsys, run, "--port", "0", "--outer-folder", str(tmp_path))
    assert "num_pages" in refused(capsys, run, "--port", "0", "--cache-gib", "1e-7")
    assert "no such run" in refused(capsys, str(tmp_path / "none"))
    with pytest.raises(UserError):
        require_keys(ServerConfig("k3", host="0.0.0.0"), Keys(), is_open=False)
    require_keys(ServerConfig("k3", host="0.0.0.0"), Keys([("k" * 16, Caller("a"))]), is_open=False)


def test_names_and_limits_of_flags(tiny_run: Path) -> None:
    """A run's folder names its model; MiB become bytes; keys are no flag."""
    config = server_config(flags.parse("serve", [str(tiny_run), "--max-body-mib", "2"]), tiny_run / "model")
    assert config.model_name == tiny_run.name and config.max_body_bytes == 2 * 2**20
    assert server_config(flags.parse("serve", ["--model-name", "k"]), tiny_run).model_name == "k"
    with pytest.raises(SystemExit):
        flags.parse("serve", ["--api-key", "sk-x"])


def test_a_server_lives_and_drains(tiny_run: Path, tmp_path: Path) -> None:
    """Greeting, an answer by key, an outer tier, drafts; SIGTERM during an answer lets it end, then exit 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENK3_API_KEYS": "ann:sk-0123456789abcdef"}
    options = [
        "--port",
        "0",
        "--cache-gib",
        "0.05",
        "--draft",
        "ngram",
        "--outer-gib",
        "0.02",
        "--outer-folder",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "openk3", "serve", str(tiny_run), *options]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.match(r"(\S+) at (http://127.0.0.1:\d+)/v1$", line)
        assert found, line + process.stderr.read()
        name, url = found.groups()
        assert "1 API key;" in process.stderr.readline()
        headers = {"authorization": "Bearer sk-0123456789abcdef"}
        body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True}
        assert httpx.get(f"{url}/metrics", headers=headers, timeout=60).text.count("openk3_outer_bytes") == 3
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60) as response:
            pieces = response.iter_text()
            text = next(pieces)
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        events = parse_events(text)
        assert events.pop() == "[DONE]" and all("error" not in event for event in events)
        assert process.wait(120) == 0
        log = process.stderr.read()
        assert "shutting down" in log and "key=ann 200" in log and "sk-0123" not in log and "Traceback" not in log
    finally:
        process.kill()
        process.wait()


def test_an_extra_that_is_missing_is_named(tiny_run: Path) -> None:
    """Without a traceback."""
    code = "import sys; sys.modules['llguidance'] = None; from openk3.cli import main; sys.exit(main(['serve']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (
        result.returncode == 2 and "pip install 'openk3[serve]'" in result.stderr and "Traceback" not in result.stderr
    )


def test_the_page_lists_every_code_and_route() -> None:
    """docs/serving.md names each `code` of an error, and each path."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "openk3" / "serve").glob("*.py"))
    codes = set(re.findall(r'code="([a-z_]+)"', sources)) - {"invalid_json", "body_cut_short"}  # plain 400s
    assert len(codes) > 12 and {code for code in codes if f"`{code}`" not in page} == set()
    paths = set(re.findall(r'"(/(?:v1/[a-z_/]+|health|metrics))"', sources))
    assert len(paths) >= 7 and {path for path in paths if f"`{path}`" not in page} == set()


def test_graphs_are_prepared_before_anybody_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU the server says how many there are, or why there are none; on a CPU there is nothing to say."""
    engine = Mock(spec=Engine)
    assert prepared(engine, torch.device("cpu")) is engine
    assert not engine.prepare.called and not capsys.readouterr().err
    for made, said in ((16, "... 16 in "), (0, "... none: the model has parts or a format without kernels")):
        engine.prepare.return_value = made
        assert prepared(engine, torch.device("cuda")) is engine
        assert f"preparing CUDA graphs for decoding {said}" in capsys.readouterr().err
