"""/metrics: every figure of the engine is in it, the page lists exactly what it prints, and figures move."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import httpx
from live_server import live_server, tiny_engine, tiny_model

from openk3.config.outer_tier import TierConfig
from openk3.config.serve import SpeculationConfig
from openk3.engine.engine import Engine
from openk3.engine.outer_tier import TierStats
from openk3.engine.speculation import DraftStats
from openk3.engine.stats import Stats
from openk3.serve.metrics import Metrics

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "serving.md"


def full_engine() -> Engine:
    """With drafts, and a tier without a folder."""
    config = tiny_engine(num_pages=64, speculation=SpeculationConfig("ngram", most_drafts=3, adaptive=False)).config
    return Engine(tiny_model(), dataclasses.replace(config, tier=TierConfig(2**24)))


def table(text: str) -> str:
    """Names, labels, kinds and help of what is printed, as a table; buckets, sums and counts are their histogram's."""
    labels: dict[str, set[str]] = {}
    for name, inside in re.findall(r"^(openk3_\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        labels.setdefault(re.sub(r"_(bucket|sum|count)$", "", name), set()).update(re.findall(r'(\w+)="', inside))
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    rows = ["| name | kind | what |", "|---|---|---|"]
    for name, help_text in re.findall(r"^# HELP (\w+) (.*)$", text, re.MULTILINE):
        shown = ", ".join(sorted(labels.get(name, set()) - {"le"}))
        rows.append(
            f"| `{name}{{{shown}}}` | {kinds[name]} | {help_text} |"
            if shown
            else f"| `{name}` | {kinds[name]} | {help_text} |"
        )
    return "\n".join([*rows, ""])


def test_the_page_lists_what_is_printed() -> None:
    """A live server with everything that a server can have; each help ends as a sentence."""
    with live_server(engine=full_engine, requests_per_minute=1) as live:
        live.chat("ab ab ab ab ab ab", max_tokens=24, temperature=0)
        assert live.chat("hi").status_code == 429
        live.wait_until_idle(60)
        text = httpx.get(f"{live.url}/metrics", timeout=60).text
    assert table(text) in PAGE.read_text(encoding="utf-8"), table(text)


def test_every_figure_of_the_engine_is_printed() -> None:
    """Each field has its own value, and each value is found once."""
    numbers = iter(range(1001, 2000))
    parts = {}
    for kind in (Stats, TierStats, DraftStats):
        fields = [field.name for field in dataclasses.fields(kind) if field.name not in ("outer", "drafts")]
        parts[kind] = {name: next(numbers) for name in fields if not name.endswith("_at")}
    places = {"drafts_at": (next(numbers), next(numbers)), "accepted_at": (next(numbers),)}
    drafts = DraftStats(**parts[DraftStats], **places)
    text = Metrics().text(Stats(**parts[Stats], outer=TierStats(**parts[TierStats]), drafts=drafts), {})
    values = [float(value) for value in re.findall(r"^openk3_.* (\S+)$", text, re.MULTILINE)]
    wanted = range(1001, next(numbers))
    assert [value for value in values if value > 1000] and {
        number: values.count(number) for number in wanted
    } == dict.fromkeys(wanted, 1)
    assert f'openk3_draft_tokens_total{{place="2"}} {places["drafts_at"][1]}\n' in text
    plain = Metrics().text(Stats(**parts[Stats]), {})
    assert "openk3_outer" not in plain and "draft" not in plain and "openk3_hit_tokens_total" in plain


def test_drafts_and_the_cache_move_their_figures() -> None:
    """Right guesses are at most the guesses at each place; a prompt sent twice hits."""
    with live_server(engine=full_engine) as live:
        for _ in range(2):
            live.chat("one two one two one two one two " * 4, max_tokens=64, temperature=0)
        live.wait_until_idle(60)
        text = httpx.get(f"{live.url}/metrics", timeout=60).text

    def value(name: str) -> float:
        return sum(float(number) for number in re.findall(rf"^openk3_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    assert value("draft_tokens_total") >= value("draft_turns_total") > 0
    assert value("accepted_draft_tokens_total") <= value("draft_tokens_total")
    assert 0 <= value("draft_length") <= 3
    assert 0 < value("hit_tokens_total") < value("asked_tokens_total")
