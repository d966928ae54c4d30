"""The flags of `openk3 serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from openk3.commands.flag_kinds import Run, unset


@dataclass(frozen=True)
class Serve:
    """Serve a model over HTTP to clients of OpenAI's and Anthropic's interfaces, many at a time.

    Keys come from a file (lines `NAME KEY`) or OPENK3_API_KEYS, never from the command line. SIGTERM or Ctrl-C takes no
    more calls and lets answers end; a second one stops at once. docs/serving.md has the routes and the threat model.

    example: openk3 serve runs/mine --port 8000

    example: openk3 serve runs/mine --host 0.0.0.0 --keys keys.txt --tokens-per-minute 100000
    """

    run: Run = None
    host: str = "127.0.0.1"
    """Address to listen on; any other than the loopback interface needs keys, or --open."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    model_name: Annotated[str, unset("NAME", "the run's folder")] = ""
    """The name that clients ask for."""
    keys: Annotated[Path | None, unset("FILE", "no keys")] = None
    """API keys: lines NAME KEY [REQUESTS_PER_MINUTE [TOKENS_PER_MINUTE]]."""
    open: bool = False
    """Serve other machines without keys."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights; auto is bfloat16 on a GPU, float32 on a CPU."""
    device: Annotated[Literal["auto", "cpu", "cuda"], arg(help="Where to run; auto takes a GPU if there is one.")] = (
        "auto"
    )
    cache_gib: Annotated[float, unset("GIB", "1, or 80 % of what is free on a GPU")] = 0.0
    """Memory of the cache of latents and states."""
    outer_gib: Annotated[float, unset("GIB", "none")] = 0.0
    """CPU memory behind the cache, for prefixes that are evicted from it."""
    outer_folder: Annotated[Path | None, unset("PATH", "none")] = None
    """Folder behind that memory, for prefixes that outlive the server; OPENK3_CACHE_SECRET seals what is in it."""
    outer_disk_gib: float = 64.0
    """Most that the folder may hold."""
    draft: Literal["off", "mtp", "ngram"] = "off"
    """Guess tokens ahead, by the MTP layer or by what followed before: the same answers, single ones faster."""
    context: Annotated[int, unset("TOKENS", "the model's")] = 0
    """Longest prompt and answer together, at most what the model has."""
    step_tokens: Annotated[int, unset("TOKENS", "2,048, or 16,384 on a GPU")] = 0
    """Most tokens in one pass of the model: long ones delay running answers."""
    prompt_interval: Annotated[int, unset("PASSES", "1, or 32 where a GPU decodes by graphs")] = 0
    """Compute prompts in every so many passes while others decode: more tokens a second on a GPU, later first ones."""
    max_requests: int = 256
    """Answers that are written at the same time; others wait."""
    max_open: int = 512
    """Calls in the server at the same time; more are answered with 503."""
    requests_per_minute: int = 0
    """Calls of each key; 0 is no limit."""
    tokens_per_minute: int = 0
    """Tokens of each key, of prompts and answers; 0 is no limit."""
    requests_at_once: int = 0
    """Calls of each key at the same time; 0 is no limit."""
    max_body_mib: int = 32
    """Largest body of a call, in MiB."""
    max_image_mib: int = 16
    """Largest picture, in MiB, before it is decoded."""
    max_images: int = 16
    """Pictures in one call."""
    image_folders: Annotated[tuple[Path, ...], unset("[PATH [PATH ...]]", "none")] = ()
    """Folders whose pictures calls may name by file: URLs."""
    fetch_images: bool = False
    """Let calls name pictures by http(s) URLs; never fetched from private addresses."""
    share_prefixes: bool = False
    """Let keys hit each other's cached prefixes: faster, but they can tell what others have asked."""
    drain_seconds: float = 60.0
    """Time that answers have to end after SIGTERM."""
