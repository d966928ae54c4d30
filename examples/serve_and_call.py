"""A server and its client: a streamed answer, an answer by schema, and a tool that the model is made to call.

python examples/serve_and_call.py [RUN]
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from openai import OpenAI

MESSAGES: list[Any] = [{"role": "user", "content": "Which of the two is larger, the sun or the moon?"}]
ANSWER = {
    "type": "object",
    "properties": {"larger": {"enum": ["sun", "moon"]}, "sure": {"type": "boolean"}},
    "required": ["larger", "sure"],
    "additionalProperties": False,
}
LOOK_UP = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"body": {"enum": ["sun", "moon"]}}, "required": ["body"]},
}


def main() -> None:
    """Start `openk3 serve` on a free port, ask, and stop it."""
    command = [sys.executable, "-m", "openk3", "serve", *sys.argv[1:2], "--port", "0", "--cache-gib", "0.1"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        name, _, url = server.stderr.readline().strip().partition(" at ")
        ask(OpenAI(base_url=url, api_key="none"), name)
    finally:
        server.terminate()
        server.wait()


def ask(client: OpenAI, model: str) -> None:
    """Three answers; the last two have their form whatever the model has learnt."""
    options: dict[str, Any] = {"model": model, "messages": MESSAGES, "extra_body": {"thinking": {"type": "disabled"}}}
    for chunk in client.chat.completions.create(**options, stream=True, max_tokens=30):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    answer = client.chat.completions.create(**options, response_format=form)
    print("\nby schema:", json.loads(answer.choices[0].message.content or ""))
    tools = [{"type": "function", "function": LOOK_UP}]
    options |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.chat.completions.create(**options).choices[0].message.tool_calls or ()
    print("by tool:", call.function.name, json.loads(call.function.arguments))


if __name__ == "__main__":
    main()
