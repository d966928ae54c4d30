"""Benchmark of the outer tier: it counts what it says, and a long prefix comes back quicker than it is computed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import prefix_tier  # noqa: E402


def test_it_measures_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short prefix: cached wherever it lies, and written down."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["prefix_tier.py", "--prefix", "1024", "--new", "32", "--out", str(out)])
    prefix_tier.main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 6 and "from disk, after a restart" in printed[-1] and out.exists()
    (tmp_path / "tier").mkdir(mode=0o700)
    rows = prefix_tier.measure(1024, 32, str(tmp_path / "tier"))
    assert [row.num_cached for row in rows] == [0, 1024, 1024, 1057, 1024]
    assert [row.num_bytes > 0 for row in rows] == [False, False, True, True, True]


@pytest.mark.slow
def test_a_prefix_of_32k_tokens_comes_back_quicker_than_it_is_computed(tmp_path: Path) -> None:
    """At least five times as quick from CPU memory, from disk, and swapped: about 20 times on a quiet machine."""
    tmp_path.chmod(0o700)
    rows = prefix_tier.measure(32768, 512, str(tmp_path))
    for row in rows:
        print(row)
    assert all(row.seconds * 5 < rows[0].seconds for row in rows[1:])
