"""MooncakeStore: what it asks of the client and makes of every answer; machines find each other's entries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_mooncake
import pytest
from checked_engine import engine, greedy, verify
from engine_model import prompt
from fake_mooncake import FakeStore, Master
from test_disk_store import get, named

from openk3.config.model import ConfigError
from openk3.config.outer_tier import MooncakeConfig, TierConfig
from openk3.engine.mooncake_store import MooncakeStore
from openk3.engine.store import StoreError

CONFIG = MooncakeConfig("master:50051", segment_bytes=1 << 20, buffer_bytes=1 << 16)


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    """Running, and the client installed."""
    monkeypatch.setitem(sys.modules, "mooncake", fake_mooncake.module())
    monkeypatch.setitem(sys.modules, "mooncake.store", fake_mooncake.module())
    monkeypatch.setitem(FakeStore.masters, "master:50051", made := Master())
    yield made
    assert made.clients == []


def test_machines_share_entries(master: Master) -> None:
    """Put by one, got by the other; sizes must agree; what exists is not written again; keys say nothing."""
    one, other = MooncakeStore(CONFIG), MooncakeStore(CONFIG)
    name, entry = named(1)
    assert one.has([name]) == [False] and get(other, name) is None
    assert one.put(name, entry) and other.put(name, memoryview(bytes(1000)))
    assert get(other, name) == bytes(entry) and other.has([name, named(2)[0]]) == [True, False]
    assert get(other, name, 999) is None and get(other, name, 1001) is None
    assert list(master.objects) == [f"openk3/{name.hex()}"]
    other.remove([name, named(2)[0]])
    assert one.has([name]) == [False], "although it was leased"
    one.close()
    other.close()


def test_a_full_store(master: Master) -> None:
    """The longest unused go; what is in use does not, and then nothing is kept; too large for the buffer is a miss."""
    store = MooncakeStore(CONFIG)
    master.room = 3000
    assert all(store.put(*named(number)) for number in (1, 2, 3))
    assert get(store, named(1)[0]) is not None
    assert store.put(*named(4)) and store.has([named(n)[0] for n in (1, 2, 3, 4)]) == [True, False, True, True]
    assert not store.put(*named(5)), "all are leased"
    master.let_leases_end()
    assert store.put(*named(5)) and not store.put(*named(6, 1 << 17))
    master.objects[f"openk3/{named(7)[0].hex()}"] = bytes(1 << 17)
    assert get(store, named(7)[0], 1 << 17) is None
    store.close()


def test_engines_of_two_machines(master: Master) -> None:
    """What one has computed and given up, the other one starts from; the answer is that of plain K3.forward."""
    one, other = (engine(tier=TierConfig(1 << 20, load="always"), store=MooncakeStore(CONFIG)) for _ in range(2))
    for machine, want in ((one, 0), (other, 32)):
        stream = machine.submit(greedy([*prompt(32), want]))
        verify(stream.result(), stream.job)
        assert stream.result().num_cached == want
        one.close()
    assert other.is_empty()
    other.close()


def test_no_master(master: Master) -> None:
    """One line with the address."""
    with pytest.raises(
        StoreError, match=r"mooncake: no connection to the master at nowhere:1 \(code -1\); is it running"
    ):
        MooncakeStore(MooncakeConfig("nowhere:1"))


def test_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install; nothing of it is imported before it is asked for."""
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(
        StoreError, match=r"mooncake: the client cannot be loaded \(.*\); pip install 'openk3\[mooncake\]'"
    ):
        MooncakeStore(CONFIG)
    code = "import sys, openk3.engine.engine, openk3.engine.mooncake_store; print('mooncake' in sys.modules)"
    root = Path(__file__).resolve().parent.parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"master": "here"}, "master: must be host:port of a running mooncake_master, got 'here'"),
        ({"segment_bytes": -1}, "segment_bytes: must be a whole number of at least 0, got -1"),
        ({"buffer_bytes": 0}, "buffer_bytes: must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_addresses_are_refused(changes: dict, message: str) -> None:
    """By field."""
    with pytest.raises(ConfigError, match=message):
        MooncakeConfig(**{"master": "a:1", **changes})
