"""describe_bodies: /openapi.json says what the routes take, though they read their bodies themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from openk3.serve.service import Dialect

_STATUS = {
    "400": "A field is wrong; the error names it.",
    "401": "No valid API key.",
    "403": "Not allowed here.",
    "404": "No such model.",
    "408": "Too slow.",
    "413": "Too large.",
    "415": "Not application/json.",
    "429": "A limit of this key is reached; retry-after says for how long.",
    "503": "Full or shutting down.",
}


def describe_bodies(app: FastAPI, dialects: Sequence[Dialect]) -> None:
    """Add each dialect's schema, and the errors, to the application's OpenAPI document."""
    plain = app.openapi
    reference = "#/components/schemas/{model}"

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            models = [(dialect.body, "validation") for dialect in dialects]
            names, shared = models_json_schema(models, ref_template=reference)  # pyrefly: ignore
            document.setdefault("components", {}).setdefault("schemas", {}).update(shared["$defs"])
            for dialect in dialects:
                route = document["paths"][dialect.path]["post"]
                schema = names[dialect.body, "validation"]
                route["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
                route["responses"] = {
                    "200": {"description": "The answer, or its events if `stream` is true."},
                    **{status: {"description": text} for status, text in _STATUS.items()},
                }
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # pyrefly: ignore
