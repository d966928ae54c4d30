"""DecodeSteps: passes of one token each, on a GPU one CUDA graph for each number of places over the engine's pages.

Launched one by one, the kernels of such a pass take longer to start than to run. A graph is captured when a number of
requests is met first (places that stand empty fill it up to the next size), and captured again where weights or parts
of the model are not where they were. One copy from pinned memory brings all that a pass needs; nothing waits for the
device. Without a GPU, or with graphs=False, the same function runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from openk3.engine.decode_cache import DecodeCache, DecodePlaces
from openk3.engine.job import Work, held
from openk3.engine.page_memory import PageMemory
from openk3.engine.page_plans import RequestCache
from openk3.model.cache import Cache
from openk3.model.capture import Form, has_kernels, is_plain
from openk3.model.k3 import K3


class Stepped(NamedTuple):
    """What a pass of N works has found, in memory that the next one overwrites: hidden values [N, D], logits [N, V]."""

    h_ND: Tensor
    logits_NV: Tensor


class _Graph(NamedTuple):
    """Places, what a pass over them leaves, and what runs one."""

    places: DecodePlaces
    out: Stepped
    run: Callable[[], None]


class DecodeSteps:
    """Passes over `memory`, whose last page is nobody's, with at most `most` requests of at most `pages` pages each."""

    def __init__(
        self, model: K3, memory: PageMemory, *, most: int, pages: int, nobody: int, graphs: bool | None = None
    ) -> None:
        """`graphs`: capture CUDA graphs; by default where the pages are on a GPU."""
        self._model, self._memory, self._most, self._nobody = model, memory, most, nobody
        self._device = memory.words_PRB.device
        self.graphs = self._device.type == "cuda" if graphs is None else graphs
        self._cache = DecodeCache(memory, model.config)
        self._tables = _Tables(most, pages)
        self._found: dict[int, _Graph] = {}
        self._pool: Any = None
        self._form: Form | None = None
        self._applies = False

    @torch.no_grad()
    def now(self) -> bool:
        """Whether the model's passes may be taken here; graphs of what it was before are dropped."""
        if self._form is None or not self._form.holds():
            self._form = Form(self._model)
            self._applies = is_plain(self._model) and (not self.graphs or has_kernels(self._model))
            self._found, self._pool = {}, None
        return self._applies

    def takes(self, work: Work) -> bool:
        """Whether a work is one token, of text, that nobody may refuse and no score is asked of."""
        job = work.job
        scored = job.request.params.prompt_logprobs is None or job.num_scored >= job.num_prompt
        return work.num_tokens == 1 and not work.num_drafts and not job.features and scored

    @torch.no_grad()
    def run(self, works: Sequence[Work]) -> Stepped:
        """One pass; states and latents move on in the pages. Room must be reserved, and plans have landed."""
        graph = self._graph_for(len(works))
        self._fill(graph.places, works)
        graph.run()
        return Stepped(graph.out.h_ND[: len(works)], graph.out.logits_NV[: len(works)])

    @torch.no_grad()
    def prepare(self) -> int:
        """Make the passes of every number of places that can come, so that none waits for it later; how many."""
        if self.now():
            for size in sorted({places_for(count, self._most) for count in range(1, self._most + 1)}, reverse=True):
                self._graph_for(size)
        return len(self._found)

    def _fill(self, places: DecodePlaces, works: Sequence[Work]) -> None:
        """Everything that differs between passes, in one copy."""
        X, N = places.head_XN.shape
        count = len(works)
        caches = [held(work) for work in works]
        table_NP = self._tables.of(caches)
        values = np.zeros(X * N + table_NP.size, dtype=np.int32)
        head_XN = values[: X * N].reshape(X, N)
        head_XN[0, :count] = [work.job.token_ids[work.start] for work in works]
        head_XN[1, :count] = [work.start for work in works]
        head_XN[2:, count:] = -1
        if X > 2:
            head_XN[2:, :count] = np.array([cache.states for cache in caches], dtype=np.int32).T
        values[X * N :] = table_NP.reshape(-1)
        host = torch.from_numpy(values)
        if self._device.type == "cuda":
            host = host.pin_memory()
        sent = host.to(self._device, non_blocking=True)
        places.head_XN.copy_(sent[: X * N].view(X, N))
        places.table_NP[:count, : table_NP.shape[1]].copy_(sent[X * N :].view(table_NP.shape))
        if count < N:
            places.table_NP[count:, 0].fill_(self._nobody)

    def _graph_for(self, count: int) -> _Graph:
        size = places_for(count, self._most)
        if size not in self._found:
            self._found[size] = self._make(size)
        return self._found[size]

    def _make(self, size: int) -> _Graph:
        """Fixed memory; with graphs, also a pass captured over it, after one without requests to compile kernels."""
        device, text = self._device, self._model.config.text
        weight = self._model.lm_head.weight
        with torch.inference_mode(False):
            places = DecodePlaces.empty(size, self._memory.shape.kda_groups, self._tables.pages, self._nobody, device)
            out = Stepped(
                torch.empty(size, text.hidden_size, dtype=weight.dtype, device=device),
                torch.empty(size, len(weight), dtype=weight.dtype, device=device),
            )

        def run() -> None:
            _forward(self._model, self._cache, places, self._memory.shape.page_tokens, out)

        if not self.graphs:
            return _Graph(places, out, run)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads (a server's, a tier's) may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = self._pool or graph.pool()
        return _Graph(places, out, graph.replay)


def _forward(model: K3, cache: DecodeCache, places: DecodePlaces, page_tokens: int, out: Stepped) -> None:
    """One pass; reads and writes fixed memory only."""
    step = cache.step = places.step(page_tokens)
    h_ND = model.backbone(model.embed(places.id_N), step.bounds, cast(Cache, cache))
    out.h_ND.copy_(h_ND)
    torch.mm(model.norm(h_ND), model.lm_head.weight.T, out=out.logits_NV)


def places_for(count: int, most: int) -> int:
    """How many places a pass of `count` requests takes: a power of two or one and a half of one, at most `most`."""
    whole = 1 << (count - 1).bit_length()
    return min(most, whole // 4 * 3 if whole >= 4 and count <= whole // 4 * 3 else whole)


class _Tables:
    """Pages of the latents of requests as rows of one array, which grow as requests do."""

    def __init__(self, most: int, pages: int) -> None:
        self.pages = pages
        self._table_RP = np.zeros((2 * most, pages), dtype=np.int32)
        self._rows: dict[RequestCache, int] = {}
        self._known = [0] * (2 * most)

    def of(self, caches: Sequence[RequestCache]) -> np.ndarray:
        """The tables of these requests, as wide as the longest one needs."""
        if len(self._rows) + len(caches) > len(self._known):
            self._rows = {}
        rows = []
        for cache in caches:
            row = self._rows.get(cache)
            if row is None:
                row = self._rows[cache] = len(self._rows)
                self._known[row] = 0
            known = self._known[row]
            if known < len(cache.pages):
                self._table_RP[row, known : len(cache.pages)] = cache.pages[known:]
                self._known[row] = len(cache.pages)
            rows.append(row)
        return self._table_RP[rows, : max(len(cache.pages) for cache in caches)]
