"""The application: routes, the checks before them, and what errors look like on the way out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import openk3
from openk3.inputs.xtml import EFFORTS
from openk3.serve.chat import CHAT
from openk3.serve.completions import COMPLETIONS
from openk3.serve.doorman import Doorman
from openk3.serve.errors import ApiError
from openk3.serve.messages import COUNT, MESSAGES
from openk3.serve.openapi import describe_bodies
from openk3.serve.page import add_page
from openk3.serve.responses import RESPONSES
from openk3.serve.service import Dialect, Service, new_id
from openk3.serve.tokenize import DETOKENIZE, TOKENIZE, tokenizer_info

LOG = logging.getLogger(__name__)
DIALECTS: tuple[Dialect, ...] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT, TOKENIZE, DETOKENIZE)
ANTHROPIC = "/v1/messages"


def make_app(service: Service) -> FastAPI:
    """The application of one service; it starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        service.thread.start(asyncio.get_running_loop())
        yield
        service.thread.stop()
        service.pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="openk3", version=openk3.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    for dialect in DIALECTS:
        app.add_api_route(
            dialect.path, _route(service, dialect), methods=["POST"], summary=dialect.title, response_model=None
        )
    _add_small_routes(app, service)
    add_page(app)

    async def refuse(http: Request, error: Exception) -> Response:
        return error_response(http.scope["path"], error if isinstance(error, ApiError) else _of_starlette(error))

    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(HTTPException, refuse)
    app.add_middleware(Doorman, config=service.config, has_keys=len(service.keys) > 0, render=error_response)
    describe_bodies(app, DIALECTS)
    return app


def error_response(path: str, error: ApiError) -> JSONResponse:
    """An error in the dialect of the path."""
    is_anthropic = path.startswith(ANTHROPIC)
    content = {**error.anthropic(), "request_id": new_id("req_")} if is_anthropic else error.openai()
    return JSONResponse(content, status_code=error.status, headers=error.headers)


def _route(service: Service, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
    async def route(http: Request) -> Response:
        return await service.handle(http, dialect)

    route.__name__ = dialect.path.strip("/").replace("/", "_")
    return route


def _add_small_routes(app: FastAPI, service: Service) -> None:
    def described() -> dict[str, Any]:
        config, sees = service.config, service.sources is not None
        return {
            "id": config.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "openk3",
            "max_model_len": service.context,
            "reasoning_efforts": list(EFFORTS),
            "input_modalities": ["text", "image"] if sees else ["text"],
            "max_images": config.max_images if sees else 0,
            "max_image_bytes": config.max_image_bytes if sees else 0,
        }

    @app.get("/v1/models", summary="The model that is served")
    async def models(http: Request) -> dict[str, Any]:
        service.gate.identify(http.headers)
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}", summary="The model of that name")
    async def model(http: Request, name: str) -> dict[str, Any]:
        service.gate.identify(http.headers)
        service.check_model(name)
        return described()

    @app.get("/tokenizer_info", summary="Names of the tokens that begin and end a text")
    async def info(http: Request) -> dict[str, Any]:
        service.gate.identify(http.headers)
        return tokenizer_info(service)

    @app.get("/health", summary="200 while requests are taken, else 503 and why")
    async def health() -> JSONResponse:
        state = "failed" if not service.thread.is_healthy else "draining" if service.gate.is_draining else "ok"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    @app.get("/metrics", summary="Counts and times in Prometheus' text format", response_class=PlainTextResponse)
    async def metrics(http: Request) -> PlainTextResponse:
        service.gate.identify(http.headers)
        gauges = {
            "calls_open": ("Calls that are under way.", service.gate.num_open),
            "engine_restarts_total": ("Engines that failed and were replaced.", service.thread.restarts.count),
            "healthy": ("1 while the engine works.", float(service.thread.is_healthy)),
        }
        text = service.metrics.text(service.thread.stats(), gauges)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _of_starlette(error: Exception) -> ApiError:
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {404: "no such route; /openapi.json lists them", 405: "the route does not take this method"}
    return ApiError(status, messages.get(status, str(getattr(error, "detail", error))))
