"""StopSignals: the first signal asks, the second Ctrl-C stops, the old handlers come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from openk3.train.interrupt import StopSignals


def test_first_signal_asks_and_second_stops() -> None:
    """Ctrl-C twice raises KeyboardInterrupt; the loop had the chance to end after the first."""
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        assert signals.requested == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_asks_however_often() -> None:
    """A supervisor that repeats SIGTERM does not cut the save short; Ctrl-C after it does."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_are_left_alone() -> None:
    """Python takes handlers in the main thread only; elsewhere training runs without them."""
    seen: list[str] = []

    def work() -> None:
        with StopSignals() as signals:
            seen.append(signals.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [""]
