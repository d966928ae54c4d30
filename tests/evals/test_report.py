"""The page from hand-made run data: complete, self-contained, escaped, and whole when parts are missing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from openk3.evals.report import column, page, write_report
from openk3.runtime.run_folder import RunFolder

STEPS = [
    {
        "step": i,
        "lm": 8.0 - i / 10,
        "mtp": 8.5 - i / 10,
        "lr": 0.01,
        "seq_len": 256 if i < 30 else 2048,
        "max_load": 1.5 - i / 100,
        "bias_spread": i / 100,
        **({"val_bpb": 4.0 - i / 20} if i % 10 == 0 else {}),
    }
    for i in range(1, 41)
]
DATA = {
    "title": "A run",
    "subtitle": "two cores",
    "targets": [
        {"name": "bits per byte", "value": "1.64", "target": "below 1.87", "met": True},
        {"name": "load", "value": "1.31", "target": "below 1.20", "met": False},
    ],
    "unigram_entropy": 5.9,
    "byte_model": [4.7, 3.5, 2.6, 2.05, 1.88, 1.87],
    "captions": {
        "right": 0.5,
        "wrong": 2.0,
        "by_kind": {"grid": {"right": 0.4, "wrong": 2.0}},
        "items": [
            {"image": "data:image/png;base64,AAAA", "text": "solid red", "written": "solid red", "redrawn": None},
            {"image": "data:image/png;base64,BBBB", "text": '<svg a="b">', "written": "x", "redrawn": "data:,z"},
        ],
    },
    "samples": [{"prompt": "def f(", "text": "x):\n    return x < 3 & True\n"}],
    "python_share": 0.75,
    "chat": [{"question": "What is <b>?", "think": "hm", "response": "A class."}],
    "chat_closed": 0.5,
    "expert_load": {"layers": [2, 3], "load": [[1.0, 0.5, 1.5], [0.9, 1.1, 1.0]]},
    "depth": {"reads": ["1 ffn", "output"], "sources": ["embed", "block 1"], "weights": [[1.0, None], [0.25, 0.75]]},
    "decay": [{"name": "layer 1", "low": 1.5, "middle": 20.0, "high": 900.0}],
    "cost": {
        "components": [["embedding", 1000, 0], ["experts", 5000, 1200]],
        "facts": [["training tokens", "12,345"]],
        "seconds": [["train", 61.234]],
    },
}
PARTS = {
    "targets": "below 1.87",
    "captions": "Images",
    "samples": "Samples",
    "chat": "Conversation",
    "expert_load": "Load of every expert",
    "depth": "Depth attention",
    "decay": "How long KDA remembers",
    "cost": "parameters",
}


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not open, and keeps what a browser would fetch."""

    VOID = {"meta", "img", "link", "br"}

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.sources: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        return None

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    assert parser.stack == []
    return parser


def test_page_is_whole_and_fetches_nothing():
    html = page(DATA, STEPS)
    parser = read(html)
    assert all(source.startswith("data:") for source in parser.sources) and len(parser.sources) == 3
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|<script|<link", html)
    assert "prefers-color-scheme:dark" in html and 'name="viewport"' in html
    text = " ".join(parser.text)
    for words in PARTS.values():
        assert words in text


def test_figures_of_the_run_are_shown():
    text = " ".join(read(page(DATA, STEPS)).text)
    for shown in (
        "✓ target: below 1.87",
        "✗ target: below 1.20",
        "80 %",
        "75 % of the sampled lines",
        "12,345",
        "61.2",
    ):
        assert shown in text
    assert "50 % of the answers" in text


def test_what_models_and_users_wrote_is_escaped():
    html = page({**DATA, "title": "<script>alert(1)</script>"}, STEPS)
    assert "<script" not in html
    text = "".join(read(html).text)
    assert "return x < 3 & True" in text and '<svg a="b">' in text and "What is <b>?" in text


@pytest.mark.parametrize("missing", sorted(PARTS))
def test_a_missing_part_is_left_out(missing):
    data = {name: value for name, value in DATA.items() if name != missing}
    text = " ".join(read(page(data, STEPS)).text)
    assert PARTS[missing] not in text or missing in ("targets", "cost")
    assert "Training loss" in text


def test_a_run_without_steps_still_has_a_page():
    assert "nothing recorded" in page({}, [])


def test_columns_skip_steps_without_the_value():
    assert column(STEPS, "val_bpb") == [(10.0, 3.5), (20.0, 3.0), (30.0, 2.5), (40.0, 2.0)]
    assert column([{"step": 1, "lm": None}], "lm") == []


def test_report_is_written_from_the_run_folder(tmp_path):
    run = RunFolder(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(DATA))
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in STEPS))
    path = write_report(run)
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == page(DATA, STEPS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "report.html", "report.json"]
