"""The router's application: routes that go on to replicas, and its own: /health, /metrics and the models of all."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from openk3.fleet.affinity import read_features, read_json
from openk3.fleet.answer import NOT_SENT, Call, end_to_end
from openk3.fleet.checks import Checks
from openk3.fleet.flight import Flight
from openk3.fleet.replica_list import ReplicaList
from openk3.fleet.router import Router
from openk3.fleet.ticket import Features
from openk3.serve.body import read_body
from openk3.serve.doorman import Doorman
from openk3.serve.errors import ApiError
from openk3.serve.gate import Lease
from openk3.serve.page import FILES

LOG = logging.getLogger(__name__)
POSTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize"),
)
GETS = ("/v1/models/{name:path}", "/tokenizer_info")
OPEN_GETS = (*FILES, "/openapi.json")  # the same for everybody: a server asks for no key there
MODELS_SECONDS = 5.0
MOST_GETS = 64  # at a time, beside the calls that are let in
Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(router: Router, replicas: ReplicaList) -> Starlette:
    """The application of one router; it starts and stops the checks and the connections to replicas."""
    checks = Checks(router, replicas)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        router.start()
        await checks.start()
        yield
        await checks.stop()
        await router.stop()

    async def refuse(http: Request, error: Exception) -> Response:
        return error_response(http.scope["path"], error if isinstance(error, ApiError) else _of_starlette(error))

    routes = [Route(path, _post(router), methods=["POST"]) for path in POSTS]
    routes += [
        Route("/health", _health(router), methods=["GET"]),
        Route("/metrics", _metrics(router), methods=["GET"]),
        Route("/v1/models", _models(router), methods=["GET"]),
    ]
    routes += [
        Route(path, _get(router, path.partition("{")[0], needs_key=path in GETS), methods=["GET"])
        for path in (*GETS, *OPEN_GETS)
    ]
    doorman = Middleware(Doorman, config=router.config, has_keys=len(router.keys) > 0, render=error_response)
    handlers: Any = {ApiError: refuse, HTTPException: refuse}
    return Starlette(routes=routes, middleware=[doorman], exception_handlers=handlers, lifespan=lifespan)


def error_response(path: str, error: ApiError) -> JSONResponse:
    """An error in the dialect of the path."""
    is_anthropic = path.startswith("/v1/messages")
    content = {**error.anthropic(), "request_id": f"req_{secrets.token_hex(12)}"} if is_anthropic else error.openai()
    return JSONResponse(content, status_code=error.status, headers=error.headers)


def _post(router: Router) -> Endpoint:
    async def route(http: Request) -> Response:
        path, began = http.scope["path"], time.monotonic()  # of the route; `http.url` has the client's Host in it
        lease, size = _admit(router, http), _size(http, router.config.max_body_bytes)

        def give_back() -> None:
            nonlocal size
            lease.release()
            router.num_held, size = router.num_held - size, 0

        router.num_held += size
        try:
            if router.num_held > router.proxy.body_bytes:
                raise ApiError(503, "the router is full; try again", code="overloaded", retry_after=1)
            body = await read_body(http, router.config)
            router.num_held, size = router.num_held - size + len(body), len(body)
            is_stream, features = _read(router, path, body, _tenant(http, lease))
        except BaseException as error:
            give_back()
            if isinstance(error, ApiError):
                router.metrics.refused[path, error.status] += 1
            raise

        def end(status: int) -> None:
            give_back()
            router.metrics.ended(path, status)
            LOG.info("%s key=%s %d %.3fs", path, lease.caller.name or "-", status, time.monotonic() - began)

        call = Call("POST", path, http.scope["query_string"], http.headers.raw, body, is_stream, features)
        return Flight(router, call, error_response, end)

    return route


def _get(router: Router, label: str, *, needs_key: bool) -> Endpoint:
    async def route(http: Request) -> Response:
        if needs_key:
            router.gate.identify(http.headers)
        if len(router.flights) >= router.config.max_open + MOST_GETS:
            raise ApiError(503, "the router is full; try again", code="overloaded", retry_after=1)
        path = http.scope.get("raw_path", http.scope["path"].encode()).decode("latin-1")
        features = Features(b"", _tenant(http, None), 1, 0)
        call = Call("GET", path, http.scope["query_string"], http.headers.raw, b"", False, features)
        return Flight(router, call, error_response, lambda status: router.metrics.ended(label, status))

    return route


def _health(router: Router) -> Endpoint:
    async def health(_: Request) -> Response:
        has_any = any(one.is_wanted for one in router.policy.replicas.values())
        state = "draining" if router.gate.is_draining else "ok" if has_any else "no_replica"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    return health


def _metrics(router: Router) -> Endpoint:
    async def metrics(http: Request) -> Response:
        router.gate.identify(http.headers)
        text = router.metrics.text(router.policy, router.gate.num_open)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return metrics


def _models(router: Router) -> Endpoint:
    """What all replicas serve; a model of several has the smallest of their contexts."""

    async def ask(name: str, headers: list[tuple[bytes, bytes]]) -> httpx.Response | None:
        try:
            async with asyncio.timeout(MODELS_SECONDS):
                return await router.client.get(f"{name}/v1/models", headers=headers, timeout=MODELS_SECONDS)
        except (httpx.HTTPError, TimeoutError):
            return None

    async def models(http: Request) -> Response:
        router.gate.identify(http.headers)
        headers = end_to_end(http.headers.raw, NOT_SENT)
        names = [name for name, one in router.policy.replicas.items() if one.is_wanted]
        answers = [answer for answer in await asyncio.gather(*(ask(name, headers) for name in names)) if answer]
        good = [found for answer in answers if answer.status_code == 200 and (found := listed_models(answer.content))]
        answers = [answer for answer in answers if 400 <= answer.status_code < 600]
        if not good and answers:  # the replicas' own word: a wrong key, say
            return Response(answers[0].content, answers[0].status_code, media_type="application/json")
        if not good:
            raise ApiError(503, "no replica takes calls now; try again", code="no_replica", retry_after=2)
        return JSONResponse({"object": "list", "data": merged_models(good)})

    return models


def listed_models(text: bytes) -> list[dict[str, Any]]:
    """Those of one replica; what is no list of models lists none."""
    try:
        rows = json.loads(text)["data"]
        return [one for one in rows if isinstance(one, dict) and isinstance(one.get("id"), str)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


def merged_models(lists: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each model once, in the order of its first mention."""
    found: dict[str, dict[str, Any]] = {}
    for one in (model for listed in lists for model in listed):
        known = found.setdefault(one["id"], dict(one))
        lengths = [length for row in (known, one) if isinstance(length := row.get("max_model_len"), int)]
        if lengths:
            known["max_model_len"] = min(lengths)
    return list(found.values())


def _admit(router: Router, http: Request) -> Lease:
    try:
        return router.gate.admit(http.headers)
    except ApiError as error:
        router.metrics.refused[http.scope["path"], error.status] += 1
        raise


def _size(http: Request, most: int) -> int:
    """Bytes of a body before it is read; as many as there may be where its client does not say."""
    declared = http.headers.get("content-length", "")
    return min(int(declared), most) if declared.isdecimal() and len(declared) < 18 else most


def _tenant(http: Request, lease: Lease | None) -> str:
    """Who shares a queue's turns: a key's owner, or where only the replicas have keys, whoever shows the same key."""
    if lease is not None and lease.caller.name:
        return lease.caller.name
    shown = http.headers.get("authorization") or http.headers.get("x-api-key") or ""
    return blake2b(shown.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest() if shown else ""


def _read(router: Router, path: str, data: bytes, tenant: str) -> tuple[bool, Features]:
    """Whether the answer streams, and what the policy has to know."""
    fleet = router.policy.config
    try:
        body = read_json(data)
        is_stream = isinstance(body, dict) and body.get("stream") is True
        return is_stream, read_features(path, body, tenant, fleet)
    except (ValueError, RecursionError):  # the replica says what is wrong with it
        return False, Features(b"", tenant, max(1, int(len(data) / fleet.bytes_per_token)), 0)


def _of_starlette(error: Exception) -> ApiError:
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {404: "no such route; /openapi.json lists them", 405: "the route does not take this method"}
    return ApiError(status, messages.get(status, str(getattr(error, "detail", error))))
