"""Gate: who may ask, how often and how much at a time; requests beyond that are refused before they are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from openk3.config.http import ServerConfig
from openk3.serve.errors import ApiError
from openk3.serve.keys import Caller, Keys

EVERYBODY = Caller("")


class Bucket:
    """A minute's allowance that refills evenly; it may be overdrawn, and then nothing is allowed until it is refilled.

    An allowance of 0 has no bottom.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute, self.level, self._at = per_minute, float(per_minute), now

    def refill(self, now: float) -> None:
        """Time has passed."""
        self.level = min(float(self.per_minute), self.level + (now - self._at) * self.per_minute / 60)
        self._at = now

    def wait(self, amount: float) -> float:
        """Seconds until so much is there."""
        return 0.0 if self.per_minute == 0 else max(0.0, (amount - self.level) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        """Spend, if need be more than there is."""
        self.level -= amount if self.per_minute else 0


class Account:
    """One caller's allowances and its requests under way."""

    def __init__(self, caller: Caller, config: ServerConfig, now: float) -> None:
        requests, tokens = caller.requests_per_minute, caller.tokens_per_minute
        self.caller = caller
        self.requests = Bucket(config.requests_per_minute if requests is None else requests, now)
        self.tokens = Bucket(config.tokens_per_minute if tokens is None else tokens, now)
        self.num_open = 0


class Lease:
    """The right to one request, until it is released; tokens that it costs are charged as they become known."""

    def __init__(self, gate: Gate, account: Account) -> None:
        self._gate, self._account = gate, account
        self._released = False

    @property
    def caller(self) -> Caller:
        """Whose request it is."""
        return self._account.caller

    def charge(self, num_tokens: int) -> None:
        """Tokens of a prompt, or of an answer."""
        self._account.tokens.take(num_tokens)

    def headers(self) -> dict[str, str]:
        """What is left, as clients of OpenAI read it."""
        rows = {"requests": self._account.requests, "tokens": self._account.tokens}
        headers = {}
        for name, bucket in rows.items():
            if bucket.per_minute:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level)))
        return headers

    def release(self) -> None:
        """The request is over; again is no harm."""
        if not self._released:
            self._released = True
            self._account.num_open -= 1
            self._gate.num_open -= 1


class Gate:
    """Used by the event loop's thread alone. `is_draining` refuses whoever comes."""

    def __init__(self, config: ServerConfig, keys: Keys, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.keys = config, keys
        self.num_open = 0
        self.is_draining = False
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Whose key it is. Raises ApiError 401; the message is the same for a missing and a wrong key."""
        if not len(self.keys):
            return EVERYBODY
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        caller = self.keys.find(key)
        if caller is None:
            raise ApiError(
                401,
                "a valid API key is needed: `Authorization: Bearer KEY` (or `x-api-key: KEY`)",
                code="invalid_api_key",
            )
        return caller

    def admit(self, headers: Mapping[str, str]) -> Lease:
        """Let a request in. Raises ApiError: 401, 429 with the time to wait, 503 while full or draining."""
        caller = self.identify(headers)
        if self.is_draining:
            raise ApiError(503, "the server is shutting down; ask another one", code="draining", retry_after=5)
        if self.num_open >= self.config.max_open:
            raise ApiError(503, "the server is full; try again", code="overloaded", retry_after=1)
        now = self._clock()
        account = self._accounts.get(caller.name) or Account(caller, self.config, now)
        self._accounts[caller.name] = account
        most = self.config.requests_at_once
        if most and account.num_open >= most:
            raise ApiError(429, f"{most} requests of this key are under way", code="too_many_at_once", retry_after=1)
        for bucket, amount, name in ((account.requests, 1.0, "requests"), (account.tokens, 0.0, "tokens")):
            bucket.refill(now)
            wait = bucket.wait(amount)
            if wait > 0:
                message = f"limit of {bucket.per_minute} {name} a minute reached; try again in {wait:.1f} s"
                raise ApiError(429, message, code="rate_limit_exceeded", retry_after=wait)
        account.requests.take(1)
        account.num_open += 1
        self.num_open += 1
        return Lease(self, account)
