"""Service: what all routes share, and the one way in which a call is let in, read, prepared, answered and ended."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from openk3.config.http import ServerConfig
from openk3.config.model import ModelConfig
from openk3.engine.request import Request
from openk3.inputs.images import MediaConfig
from openk3.inputs.tokenizer import Tokenizer
from openk3.serve.answers import Answers, Usage
from openk3.serve.body import read_body
from openk3.serve.constraints import Constraints
from openk3.serve.engine_thread import EngineThread
from openk3.serve.errors import ApiError, from_validation
from openk3.serve.gate import Gate, Lease
from openk3.serve.image_sources import ImageSources
from openk3.serve.keys import Caller, Keys
from openk3.serve.metrics import Metrics
from openk3.serve.sse import EventStream, wait_until_gone

LOG = logging.getLogger(__name__)
PREPARERS = 4  # threads that tokenise and read images
GONE = 499  # in metrics and logs: the client went away
Result = TypeVar("Result")


class Call(Protocol):
    """One call as a dialect has prepared it."""

    id: str
    is_stream: bool

    @property
    def requests(self) -> Sequence[Request]:
        """What the engine is asked, one for each choice."""
        ...

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def stream(self, answers: Answers) -> AsyncGenerator[bytes]:
        """The answer as server-sent events; an ApiError on the way becomes the last one."""
        ...

    def usage(self, answers: Answers) -> Usage:
        """Tokens so far."""
        ...


@dataclass(frozen=True)
class Dialect:
    """A route: the body's schema, and how a call, or at once the answer, is made from it, in a thread of a pool."""

    path: str
    body: type[BaseModel]
    prepare: Callable[[Service, Any, Caller], Call | dict[str, Any]]
    title: str


@dataclass
class Service:
    """One model behind HTTP."""

    config: ServerConfig
    thread: EngineThread
    tokenizer: Tokenizer
    model: ModelConfig
    media: MediaConfig
    keys: Keys
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.gate = Gate(self.config, self.keys)
        self.metrics = Metrics()
        self.constraints = Constraints(self.tokenizer)
        self.pool = ThreadPoolExecutor(PREPARERS, thread_name_prefix="prepare")
        media = replace(self.media, max_pixels=min(self.media.max_pixels, self.config.max_image_pixels))
        most = max(1, self.context // 4)  # the question and the answer need room too
        self.sources = None if self.model.vision is None else ImageSources(self.config, media, most)

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return min(self.thread.config.cache.max_tokens, self.model.text.max_position_embeddings)

    def tenant(self, caller: Caller) -> str:
        """Whose prefixes a caller may hit: its own, unless all are shared."""
        return "" if self.config.share_prefixes else caller.name

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 unless it is the one that is served."""
        if name != self.config.model_name:
            message = f"model: {name[:80]!r} is not served here; there is {self.config.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def in_pool(self, work: Callable[[], Result]) -> Result:
        """Run what takes long outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def handle(self, http: HttpRequest, dialect: Dialect) -> Response:
        """Answer one call. Raises ApiError for all that goes wrong before the answer begins."""
        try:
            visit = Visit(self, dialect.path, self.gate.admit(http.headers))
        except ApiError as error:
            self.metrics.refused(dialect.path, error.status)
            raise
        try:
            data = await read_body(http, self.config)
            call = await self.in_pool(lambda: dialect.prepare(self, read_model(data, dialect.body), visit.lease.caller))
            if isinstance(call, dict):
                visit.status = 200
                visit.end()
                return JSONResponse(call, headers=visit.lease.headers())
            visit.call = call
            visit.answers = Answers(self.thread, call.requests, self.config.unread_tokens)
            await self.in_pool(visit.answers.submit)
            visit.charge_prompt()
            headers = {"x-request-id": call.id, **visit.lease.headers()}
            if call.is_stream:
                return EventStream(
                    visit.watched(call.stream(visit.answers)),
                    on_end=visit.end,
                    write_seconds=self.config.write_seconds,
                    headers=headers,
                )
            answer = await _unless_gone(call.whole(visit.answers), http)
        except ApiError as error:
            visit.status = error.status
            visit.end()
            raise
        except BaseException:
            visit.status = 500
            visit.end()
            raise
        visit.status = GONE if answer is None else 200
        visit.end()
        return Response(status_code=GONE) if answer is None else JSONResponse(answer, headers=headers)


class Visit:
    """One call from its admission to its end, whatever the end is; `end` gives back everything that it held."""

    def __init__(self, service: Service, path: str, lease: Lease) -> None:
        self._service, self._path, self.lease = service, path, lease
        self._began = time.monotonic()
        self.status = GONE  # until it is known better
        self.call: Call | None = None
        self.answers: Answers | None = None
        self._is_over = False
        self._charged = 0

    def charge_prompt(self) -> None:
        """At once, so that many long prompts are not let in before the first one ends."""
        if self.answers is not None:
            self._charged, _ = self.answers.prompt_usage()
            self.lease.charge(self._charged)

    async def watched(self, source: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """The same events; the last one says that the call went well."""
        try:
            async for data in source:
                yield data
            failed = self.answers.error if self.answers is not None else None
            self.status = 200 if failed is None else failed.status
        finally:
            await source.aclose()

    def end(self) -> None:
        """Cancel what still runs, release the lease, charge and count; once."""
        if self._is_over:
            return
        self._is_over = True
        usage, first = Usage(0, 0, 0), None
        if self.answers is not None and self.call is not None:
            self.answers.close()
            usage, first = self.call.usage(self.answers), self.answers.first_token_at
        self.lease.charge(usage.num_prompt - self._charged + usage.num_answer)
        self.lease.release()
        seconds = time.monotonic() - self._began
        wait = None if first is None else first - self._began
        self._service.metrics.ended(self._path, self.status, seconds, wait, usage)
        who = self.lease.caller.name or "-"
        LOG.info(
            "%s %s key=%s %d %.3fs prompt=%d cached=%d answer=%d",
            *(self.call.id if self.call else "-", self._path, who, self.status, seconds),
            *(usage.num_prompt, usage.num_cached, usage.num_answer),
        )


def read_model(data: bytes, model: type[BaseModel]) -> Any:
    """A body as the schema's object. Raises ApiError 400 naming the first field at fault.

    JSON has no infinite numbers: neither by name, nor as one that is too large.
    """
    try:
        body = from_json(data, allow_inf_nan=False)
        json.dumps(body, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, f"body: not JSON ({error})", code="invalid_json") from None
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None


def new_id(prefix: str) -> str:
    """A name that no other answer has."""
    return f"{prefix}{secrets.token_hex(12)}"


async def _unless_gone(work: Any, http: HttpRequest) -> Any:
    """What `work` returns, or None as soon as the client has gone away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_gone(http.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
