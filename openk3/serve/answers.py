"""Answers: the requests of one HTTP call in the engine, read as they come, and ended when the client goes away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from openk3.engine.hybrid_cache import RequestTooLarge
from openk3.engine.request import Finish, Request, Token
from openk3.engine.stream import Update
from openk3.serve.constraints import GrammarError
from openk3.serve.engine_thread import EngineDown, EngineLost, EngineThread
from openk3.serve.errors import ApiError, from_value_error
from openk3.serve.mail import News, Ticket

LOG = logging.getLogger(__name__)


class Piece(NamedTuple):
    """News of one choice: tokens of its answer, scored tokens of its prompt, perhaps how the engine ended it."""

    choice: int
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[Token, ...] = ()
    finish: Finish | None = None

    def then(self, more: Piece) -> Piece:
        """This piece and the next one of the same choice."""
        tokens, prompt_tokens = self.tokens + more.tokens, self.prompt_tokens + more.prompt_tokens
        return Piece(self.choice, tokens, prompt_tokens, more.finish)


class Usage(NamedTuple):
    """Tokens of a whole HTTP call."""

    num_prompt: int
    num_cached: int
    num_answer: int
    num_reasoning: int = 0


class Answers:
    """One engine request per choice. Used in the event loop; `submit` alone runs in another thread.

    At most `most_unread` tokens wait for a client: who is further behind is cut off, and the engine goes on with
    others. A choice that its reader has ended (a stop text) is cancelled in the engine by `end`.
    """

    def __init__(self, thread: EngineThread, requests: Sequence[Request], most_unread: int) -> None:
        self._thread, self._requests, self._most_unread = thread, requests, most_unread
        self._tickets: list[Ticket] = []
        self._open = set(range(len(requests)))
        self._ended: set[int] = set()  # by their reader
        self._pieces: deque[Piece] = deque()
        self._num_unread = 0
        self.error: ApiError | None = None
        self.first_token_at: float | None = None
        self._changed = asyncio.Event()
        self._is_closed = False

    def submit(self) -> None:
        """Give everything to the engine, or nothing. Raises ApiError 400 for what it refuses, 503 if it is down."""
        try:
            for choice, request in enumerate(self._requests):
                self._tickets.append(self._thread.submit(request, self._sink(choice)))
            if self._is_closed:  # the client went away meanwhile
                self.close()
        except RequestTooLarge as error:
            self.close()
            raise ApiError(400, str(error), code="context_length_exceeded") from None
        except ValueError as error:
            self.close()
            raise from_value_error(error) from None
        except EngineDown as error:
            self.close()
            raise ApiError(503, str(error), code="engine_down", retry_after=5) from None

    async def pieces(self) -> AsyncGenerator[Piece]:
        """News until all choices have ended. Raises ApiError if one failed; then all are cancelled."""
        while True:
            while self._pieces:
                for piece in self._take_all():
                    if piece.choice not in self._ended:
                        yield piece
            if self.error is not None:
                raise self.error
            if not self._open:
                return
            self._changed.clear()
            await self._changed.wait()

    def _take_all(self) -> list[Piece]:
        """What waits, in one piece for each choice: who is behind gets more at a time, and catches up."""
        joined: dict[int, Piece] = {}
        for piece in self._pieces:
            before = joined.get(piece.choice)
            joined[piece.choice] = piece if before is None else before.then(piece)
        self._pieces.clear()
        self._num_unread = 0
        return list(joined.values())

    def end(self, choice: int) -> None:
        """This choice has ended for its reader; what the engine still says about it is dropped."""
        self._ended.add(choice)
        if choice in self._open:
            self._open.discard(choice)
            self._thread.cancel(self._tickets[choice])
            self._changed.set()

    def close(self) -> None:
        """End what has not ended, from any thread: the client is gone, or has all that it wanted."""
        self._is_closed = True
        for ticket in self._tickets:
            self._thread.cancel(ticket)

    def prompt_usage(self) -> tuple[int, int]:
        """(tokens of prompts, those of them that were cached); choices of one prompt count it once."""
        seen: dict[int, tuple[int, int]] = {}
        for request, ticket in zip(self._requests, self._tickets):
            (total, cached), (_, before) = ticket.counts, seen.get(id(request.prompt), (0, 0))
            seen[id(request.prompt)] = (total, max(cached, before))
        return sum(total for total, _ in seen.values()), sum(cached for _, cached in seen.values())

    def _sink(self, choice: int) -> Callable[[News], None]:
        return lambda news: self._take(choice, *news)

    def _take(self, choice: int, update: Update | None, lost: Finish | None) -> None:
        """Called in the event loop."""
        if self._is_closed or choice not in self._open:
            return
        finish = lost or (update.finish if update else None)
        if finish is not None:
            self._open.discard(choice)
        if finish is not None and finish.reason in ("error", "cancelled"):
            self._fail(_api_error(finish))
        elif update is not None:
            if update.tokens and self.first_token_at is None:
                self.first_token_at = time.monotonic()
            self._pieces.append(Piece(choice, update.tokens, update.prompt_tokens, finish))
            self._num_unread += len(update.tokens)
            if self._num_unread > self._most_unread:
                LOG.warning("a client is %d tokens behind and is cut off", self._num_unread)
                self._fail(ApiError(408, "the answer was not read in time", code="client_too_slow"))
        self._changed.set()

    def _fail(self, error: ApiError) -> None:
        self.error = self.error or error
        self._open.clear()
        self.close()


def _api_error(finish: Finish) -> ApiError:
    error = finish.error
    if isinstance(error, EngineLost):
        return ApiError(500, str(error), code="engine_failed")
    if error is None:
        return ApiError(503, "the server is shutting down", code="draining", retry_after=5)
    if isinstance(error, GrammarError):  # a schema that was followed for a while, and then asked too much
        return ApiError(400, f"the schema cannot be followed any further: {error}", code="invalid_schema")
    LOG.error("a request failed in the engine", exc_info=error)
    return ApiError(500, f"the model failed on this request ({type(error).__name__})", code="request_failed")
