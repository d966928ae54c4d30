"""lm-eval by URL: a harness of somebody else's scores and generates through the server, on tasks of local JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import MODEL, TOKENIZER, Live, live_server, tiny_model, turn

from openk3.inputs.packed import Packed

QUESTIONS = [
    {"question": f"the message {n} is", "choices": ["é a role", " the system", "type user"], "answer": n % 3}
    for n in range(12)
]
CHOICES_TASK = """
task: openk3_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
WRITING_TASK = """
task: openk3_writing
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "forty two"
generation_kwargs: {until: [".", "STOP"], max_gen_toks: 60, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def scores(text: str, choices: list[str]) -> list[float]:
    """Log-probability of each choice behind the text, by one pass of the model itself."""
    found = []
    for choice in choices:
        # lm-eval moves a text's last space to the choice, and tokenises text and choice as one
        whole, start = TOKENIZER.encode(f"{text} {choice}"), len(TOKENIZER.encode(text))
        with torch.no_grad():
            rows_TV = tiny_model()(Packed.join([whole]))[:-1].log_softmax(-1)
        chosen_T = rows_TV.gather(1, torch.tensor(whole[1:])[:, None]).squeeze(1)
        found.append(float(chosen_T[start - 1 :].sum()))
    return found


def evaluate(live: Live, folder: Path, task: str, model: str, route: str, *options: str) -> list[Any]:
    """Samples that lm-eval logs for a task."""
    (folder / "data.json").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, text in (("choices", CHOICES_TASK), ("writing", WRITING_TASK)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "data.json")))
    arguments = f"model={MODEL},base_url={live.url}{route},num_concurrent=4,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", ",".join((arguments, *options))]
    command += ["--tasks", task, "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    command += ["--apply_chat_template"] if "chat" in route else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "none"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    (logged,) = (folder / "out").rglob(f"samples_{task}*.jsonl")
    samples = [json.loads(line) for line in logged.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_harness_of_somebody_elses(tmp_path: Path) -> None:
    """Multiple choice by log-probabilities of echoed prompts, equal to the model's own; and generation by chat."""
    assert find_spec("lm_eval"), (
        "lm-eval is not installed; `make test-slow` installs it (pip install 'openk3[harness]')"
    )
    with live_server() as live:
        for name in ("choices", "writing"):
            (tmp_path / name).mkdir()
        route, backend = "/v1/completions", "tokenizer_backend=remote"
        samples = evaluate(live, tmp_path / "choices", "openk3_choices", "local-completions", route, backend)
        assert len(samples) == len(QUESTIONS)
        for sample, question in zip(samples, QUESTIONS):
            got = [float(response[0][0]) for response in sample["resps"]]
            assert got == pytest.approx(scores(question["question"], question["choices"]), abs=2e-3)
        live.say("message", turn("forty two. And more", "hm"))
        chat = evaluate(live, tmp_path / "writing", "openk3_writing", "local-chat-completions", "/v1/chat/completions")
        assert [sample["resps"] for sample in chat] == [[["forty two"]]] * len(QUESTIONS)
        assert all(sample["exact_match"] == 1.0 for sample in chat)
        live.wait_until_idle()
