"""`openk3 serve`: a model behind HTTP, for clients of OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from pathlib import Path

from openk3.commands.errors import UserError

try:
    import fastapi  # noqa: F401
    import llguidance  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:  # an extra of the package
    raise UserError(f"openk3 serve needs the package {error.name}; pip install 'openk3[serve]'") from None

import torch

from openk3.commands.chat import load_media
from openk3.commands.flags import Serve
from openk3.commands.generate import load_tokenizer
from openk3.commands.listening import bind, require_keys, shown_address
from openk3.commands.memory import GIB, require_memory
from openk3.commands.runs import about_model, find_model
from openk3.config.http import MIB, ServerConfig
from openk3.config.model import ModelConfig
from openk3.config.outer_tier import TierConfig
from openk3.config.sampling import read_sampling
from openk3.config.serve import CacheConfig, EngineConfig, SpeculationConfig
from openk3.engine.engine import Engine
from openk3.model.k3 import K3
from openk3.runtime.device import pick_device, pick_dtype
from openk3.serve.app import make_app
from openk3.serve.engine_thread import EngineThread
from openk3.serve.keys import Keys, read_keys
from openk3.serve.server import DrainingServer
from openk3.serve.service import Service
from openk3.serve.supervisor import Supervisor

SECRET = "OPENK3_CACHE_SECRET"
CPU_CACHE = GIB
GPU_SHARE = 0.8  # of the memory that is free once the weights are there


def run(flags: Serve) -> None:
    """Serve until SIGTERM or Ctrl-C, then let answers end. Raises UserError, and SystemExit if the engine gave up."""
    directory = find_model(flags.run)
    config = server_config(flags, directory)
    keys = read_keys(flags.keys, os.environ)
    require_keys(config, keys, is_open=flags.open)
    with contextlib.closing(bind(config)) as listener:
        service = load(flags, directory, config, keys)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        server = DrainingServer(make_app(service), service, Supervisor(os.environ))
        about = f"{about_model(directory)}\n" if flags.run is None else ""
        print(f"{about}{greeting(service, listener)}", file=sys.stderr, flush=True)
        server.run(sockets=[listener])
    if server.failed:
        raise SystemExit("openk3: the engine failed too often; the log says why")


def server_config(flags: Serve, directory: Path) -> ServerConfig:
    """The HTTP side's limits. Raises ConfigError naming the field, UserError for folders that do not exist."""
    for folder in flags.image_folders:
        if not folder.is_dir():
            raise UserError(f"--image-folders: {folder} is no folder")
    sampling = read_sampling(directory)
    own = directory.parent.name if directory.name == "model" else directory.name
    return ServerConfig(
        model_name=flags.model_name or own or "k3",
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        host=flags.host,
        port=flags.port,
        max_body_bytes=flags.max_body_mib * MIB,
        max_images=flags.max_images,
        max_image_bytes=flags.max_image_mib * MIB,
        max_open=flags.max_open,
        requests_per_minute=flags.requests_per_minute,
        tokens_per_minute=flags.tokens_per_minute,
        requests_at_once=flags.requests_at_once,
        drain_seconds=flags.drain_seconds,
        image_folders=flags.image_folders,
        fetch_images=flags.fetch_images,
        share_prefixes=flags.share_prefixes,
    )


def load(flags: Serve, directory: Path, config: ServerConfig, keys: Keys) -> Service:
    """Model, cache and engine. Raises ConfigError or UserError if they do not fit."""
    device = pick_device(flags.device)
    dtype, shape = pick_dtype(flags.dtype, device), ModelConfig.from_json(directory)
    require_memory(str(directory), shape, dtype.itemsize, device)
    tokenizer, media = load_tokenizer(directory), load_media(directory)
    model = K3.from_pretrained(directory, dtype=dtype, device=device).requires_grad_(False)
    context = min(flags.context or shape.text.max_position_embeddings, shape.text.max_position_embeddings)
    cache = CacheConfig.of(
        shape,
        cache_bytes(flags, device),
        value_bytes=dtype.itemsize,
        max_requests=flags.max_requests,
        max_tokens=context,
    )
    speculation = None if flags.draft == "off" else SpeculationConfig(flags.draft)
    engine = EngineConfig(
        cache,
        step_tokens=flags.step_tokens,
        prompt_interval=flags.prompt_interval,
        speculation=speculation,
        tier=outer_tier(flags),
    )
    return Service(config, EngineThread(lambda: prepared(Engine(model, engine), device)), tokenizer, shape, media, keys)


def prepared(engine: Engine, device: torch.device) -> Engine:
    """With what decoding needs compiled and captured, so that no client waits for it; says so where it takes time."""
    if device.type == "cuda":
        print("preparing CUDA graphs for decoding ...", end=" ", file=sys.stderr, flush=True)
        began = time.perf_counter()
        made = engine.prepare()
        took = f"{made} in {time.perf_counter() - began:.1f} s"
        reason = "none: the model has parts or a format without kernels, so passes run kernel by kernel"
        print(took if made else reason, file=sys.stderr, flush=True)
    return engine


def cache_bytes(flags: Serve, device: torch.device) -> int:
    """Memory of the pages. Raises UserError for one that is not positive."""
    if flags.cache_gib < 0:
        raise UserError(f"--cache-gib: must be positive, got {flags.cache_gib:g}")
    if flags.cache_gib:
        return int(flags.cache_gib * GIB)
    return int(GPU_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else CPU_CACHE


def outer_tier(flags: Serve) -> TierConfig | None:
    """Memory behind the pages, if it is asked for. Raises ConfigError, and UserError for a folder without memory."""
    if not flags.outer_gib:
        if flags.outer_folder is not None:
            raise UserError("--outer-folder: needs memory before it; give --outer-gib too")
        return None
    return TierConfig(
        int(flags.outer_gib * GIB),
        None if flags.outer_folder is None else str(flags.outer_folder),
        int(flags.outer_disk_gib * GIB),
        secret=os.environ.get(SECRET, "").encode(),
    )


def greeting(service: Service, listener: socket.socket) -> str:
    """What is served where, and who may use it."""
    address = shown_address(listener)
    pages = service.thread.config.cache
    size = pages.num_pages * pages.pages.page_bytes / GIB
    count = len(service.keys)
    who = f"{count} API key{'s' * (count > 1)}" if count else "no API keys: whoever reaches it may use it"
    return (
        f"{service.config.model_name} at {address}/v1\n"
        f"  chat at {address}/; context {service.context:,} tokens, cache {size:.2f} GiB, {who};"
        " Ctrl-C stops it when answers have ended"
    )
