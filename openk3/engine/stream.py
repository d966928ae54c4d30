"""Stream: the answer to one request as it comes, token by token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Self

from openk3.engine.job import Job
from openk3.engine.request import Completion, Finish, Token

if TYPE_CHECKING:
    from openk3.engine.engine import Engine

IDLE_SECONDS = 0.001  # between looks at an engine whose requests are all parked


class Update(NamedTuple):
    """What one step has brought to one request: tokens, tokens of its prompt that were scored, perhaps its end."""

    stream: Stream
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[Token, ...]
    finish: Finish | None


Listener = Callable[[Update], None]


class Stream(Iterator[Token]):
    """Iterate for tokens: whoever waits for one steps the engine, for all of its requests.

    A request that failed raises its error behind its last token. `result` never raises and waits for the end. In a
    server, where a thread steps the engine, a listener (see Engine.submit) is told instead, and nobody iterates.
    """

    def __init__(self, engine: Engine, job: Job, listener: Listener | None = None) -> None:
        self.job = job
        self.listener = listener
        self.finish: Finish | None = None
        self.tokens: list[Token] = []
        self.prompt_tokens: list[Token] = []
        self._engine = engine
        self._unread: deque[Token] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        while not self._unread and self.finish is None:
            self._advance()
        if self._unread:
            return self._unread.popleft()
        assert self.finish is not None
        if self.finish.error is not None:
            raise self.finish.error
        raise StopIteration

    def result(self) -> Completion:
        """The whole answer, once it has ended."""
        while self.finish is None:
            self._advance()
        job = self.job
        tokens = tuple(self.tokens), self.finish, job.num_prompt, job.num_cached or 0, tuple(self.prompt_tokens)
        return Completion(*tokens)

    def cancel(self) -> None:
        """End it now, or with the step that is under way; what it held goes back. Nothing if it has ended."""
        self._engine.cancel(self)

    def take(self, update: Update) -> None:
        """What a step has brought; called by the engine."""
        self.tokens += update.tokens
        self.prompt_tokens += update.prompt_tokens
        self._unread += update.tokens
        self.finish = update.finish or self.finish

    def _advance(self) -> None:
        if not self._engine.step() and self.finish is None and not self._unread:
            time.sleep(IDLE_SECONDS)
