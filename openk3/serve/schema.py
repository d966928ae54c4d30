"""What /v1/chat/completions and /v1/completions take, field by field; a field that cannot be honoured is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from openk3.inputs.xtml import EFFORTS

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_LOGPROBS = 20
MAX_SEED = 2**63

Text = Annotated[str, Field(max_length=2**26)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=100_000)]
Messages = Annotated[
    Objects,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "description": "Roles system, developer (the same), user, assistant and tool. Content is text or a list of"
            " text and image_url parts; an assistant's reasoning_content and tool_calls are kept.",
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
            },
        }
    ),
]


class Strict(BaseModel):
    """No unknown fields, no conversion of types, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # also in each chunk, so far; for clients that show it or stop early
    include_obfuscation: bool | None = None  # accepted; the stream is never padded


class Thinking(Strict):
    """Whether to reason before the answer."""

    type: Literal["enabled", "disabled"]


class JsonSchema(Strict):
    """The schema of response_format json_schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer has to look like; json_object and json_schema are enforced while it is written."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema.schema: missing; it must hold the JSON Schema")
        return self


class Sampling(Strict):
    """What both routes share: how tokens are chosen, where the answer ends, and OpenAI's fields without effect here."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, lt=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Neutral values only: nothing here can honour another one.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None

    @field_validator("stop")
    @classmethod
    def _usable_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} texts")
        if any(not stop or len(stop) > MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"a text must have 1 to {MAX_STOP_CHARS} characters")
        return value

    @field_validator("presence_penalty", "frequency_penalty", "logit_bias")
    @classmethod
    def _neutral(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported; leave it out")
        return value

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Annotated[Any, WithJsonSchema({"enum": [*EFFORTS, None]})] = None
    thinking: Thinking | None = None
    # OpenAI's fields that change nothing about an answer.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: differs from max_completion_tokens; give one of them")
        return self


class CompletionRequest(Sampling):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Any,
        WithJsonSchema(
            {
                "description": "A text, a list of texts, a list of token ids, or a list of such lists.",
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "integer"}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                ],
            }
        ),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool = True  # [BOS] before each text, as documents are trained
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("is not supported; leave it out")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: must equal n; answers are not ranked here")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 asks for nothing, unless echo is true")
        return self


def check_effort(value: object, field: str) -> str | None:
    """low, high, max, or None for the default. Raises ValueError that lists the values for anything else."""
    if value is not None and value not in EFFORTS:
        shown = repr(value)[:40]
        raise ValueError(
            f"{field}: {shown} is not supported; use one of {', '.join(EFFORTS)}, or leave it out ({EFFORTS[-1]})"
        )
    return value if isinstance(value, str) else None
