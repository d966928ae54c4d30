"""Keys and the gate: who comes in, how often, and what a refusal says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from openk3.config.http import ServerConfig
from openk3.config.model import ConfigError
from openk3.serve.errors import ApiError
from openk3.serve.gate import Bucket, Gate
from openk3.serve.keys import Caller, Keys, read_keys

A, B = "sk-aaaaaaaaaaaaaaaa", "sk-bbbbbbbbbbbbbbbb"


class Clock:
    """Time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def gate(clock: Clock, **limits: int) -> Gate:
    """For two keys, the second with limits of its own."""
    keys = Keys([(A, Caller("ann")), (B, Caller("bob", 2, 50))])
    return Gate(ServerConfig("k3", **limits), keys, clock)


def bearer(key: str) -> dict[str, str]:
    """The header."""
    return {"authorization": f"Bearer {key}"}


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With comments and limits; a file that all may read is warned of; names are tenants."""
    file = tmp_path / "keys.txt"
    file.write_text(f"# of the team\nann {A}\n\nbob {B} 60 1000\n")
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        keys = read_keys(file, {"OPENK3_API_KEYS": "sk-cccccccccccccccc, dan:sk-dddddddddddddddd"})
    assert "chmod 600" in caplog.text and A not in caplog.text
    assert len(keys) == 4 and keys.find(A) == Caller("ann") and keys.find(B) == Caller("bob", 60, 1000)
    assert keys.find("sk-cccccccccccccccc") == Caller("key1") and keys.find("sk-dddddddddddddddd") == Caller("dan")
    assert keys.find("") is keys.find(A[:-1]) is keys.find(A + "x") is keys.find("ann") is None
    assert len(read_keys(None, {})) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("ann", ":1: expected NAME KEY"),
        (f"ann {A}\nbob short", ":2: a key has 16 to 512 visible"),
        (f"ann {A} many", ":1: limits are whole numbers"),
        (f"a/b {A}", ":1: expected NAME KEY"),
        (f"ann {A}\nann {B}", "one name is given twice"),
        (f"ann {A}\nbob {A}", "one key is given twice"),
    ],
)
def test_wrong_key_files(tmp_path: Path, text: str, message: str) -> None:
    """One line that names the place and never a key."""
    file = tmp_path / "keys.txt"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=message) as error:
        read_keys(file, {})
    assert "aaaa" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none", {})


def test_wrong_keys_are_refused_alike() -> None:
    """Missing, wrong and half right: one message."""
    door = gate(Clock())
    messages = set()
    for headers in ({}, bearer("x" * 20), bearer(A[:-1]), {"authorization": A}, {"x-api-key": "x"}, bearer("")):
        with pytest.raises(ApiError) as error:
            door.admit(headers)
        assert error.value.status == 401 and error.value.headers["www-authenticate"] == "Bearer"
        messages.add(error.value.message)
    assert len(messages) == 1 and door.num_open == 0
    assert door.admit(bearer(A)).caller.name == "ann" and door.admit({"x-api-key": B}).caller.name == "bob"


def test_requests_per_minute() -> None:
    """A key's own limit, refilled evenly; the answer says how long to wait; another key is not concerned."""
    clock = Clock()
    door = gate(clock)
    for _ in range(2):
        lease = door.admit(bearer(B))
        lease.release()
    assert lease.headers()["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(ApiError, match="limit of 2 requests a minute") as error:
        door.admit(bearer(B))
    assert error.value.status == 429 and error.value.headers["retry-after"] == "30"
    door.admit(bearer(A)).release()
    clock.now += 29.9
    with pytest.raises(ApiError):
        door.admit(bearer(B))
    clock.now += 0.2
    door.admit(bearer(B)).release()


def test_tokens_per_minute_may_be_overdrawn_once() -> None:
    """Nobody knows an answer's length beforehand: who has spent more than there is waits until it is paid off."""
    clock = Clock()
    door = gate(clock, tokens_per_minute=60)
    lease = door.admit(bearer(A))
    lease.charge(80)
    lease.release()
    with pytest.raises(ApiError, match="tokens a minute") as error:
        door.admit(bearer(A))
    assert error.value.retry_after == pytest.approx(20)
    clock.now += 20.1
    door.admit(bearer(A))


def test_calls_at_once_and_a_full_server() -> None:
    """429 for the key's own, 503 for the server's; a lease that is released twice counts once."""
    door = gate(Clock(), requests_at_once=1, max_open=2)
    first, second = door.admit(bearer(A)), door.admit(bearer(B))
    with pytest.raises(ApiError) as error:
        door.admit(bearer(A))
    assert (error.value.status, error.value.code) == (503, "overloaded")
    second.release()
    second.release()
    assert door.num_open == 1
    with pytest.raises(ApiError) as error:
        door.admit(bearer(A))
    assert (error.value.status, error.value.code) == (429, "too_many_at_once")
    first.release()
    door.admit(bearer(A))
    door.is_draining = True
    with pytest.raises(ApiError) as error:
        door.admit(bearer(B))
    assert (error.value.status, error.value.code) == (503, "draining")


def test_a_bucket_without_a_limit() -> None:
    """Nothing is counted."""
    bucket = Bucket(0, 0.0)
    bucket.take(1e9)
    bucket.refill(1.0)
    assert bucket.wait(1e9) == 0.0


def test_wrong_settings() -> None:
    """By field."""
    for changes, message in (
        ({"port": 70000}, "port"),
        ({"max_open": 0}, "max_open"),
        ({"max_images": -1}, "max_images"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServerConfig("k3", **changes)
    with pytest.raises(ConfigError, match="model_name"):
        ServerConfig("")
