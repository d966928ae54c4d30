"""An engine is killed while it writes prefixes to a folder, again and again: the next one's answers are right."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checked_engine import engine, greedy, verify
from engine_model import prompt

from openk3.config.outer_tier import TierConfig

ROOT = Path(__file__).resolve().parent.parent.parent
PATHS = [str(ROOT / folder) for folder in (".", "tests", "tests/ops", "tests/engine")]
WRITER = f"""
import sys
sys.path[:0] = {PATHS!r}
from checked_engine import engine, greedy
from engine_model import prompt
from openk3.config.outer_tier import TierConfig
one = engine(24, tier=TierConfig(90_000, sys.argv[1], load="always"))
print("begun", flush=True)
turn = int(sys.argv[2])
while True:
    one.generate([greedy([*prompt(20, turn % 7), *prompt(9, 50 + turn + n)], 2, turn_ends=[20]) for n in range(2)])
    turn += 1
"""


@pytest.mark.slow
def test_killed_while_it_writes(tmp_path: Path) -> None:
    """SIGKILL at any moment; then the files lead to the right tokens, and some of them are used."""
    tmp_path.chmod(0o700)
    cached = 0
    for turn in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(turn)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        time.sleep(0.7 + 0.31 * turn)
        process.send_signal(signal.SIGKILL)
        process.wait()
        one = engine(tier=TierConfig(1 << 20, str(tmp_path), load="always"))
        for n in range(7):
            stream = one.submit(greedy([*prompt(20, n), turn]))
            verify(stream.result(), stream.job)
            cached += stream.result().num_cached or 0
        outer = one.stats().outer
        assert outer is not None and outer.num_corrupt == 0 and one.is_empty()
        one.close(write=False)
    assert cached, "nothing was ever found: the test shows nothing"
