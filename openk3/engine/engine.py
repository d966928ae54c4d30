"""Engine: requests in, tokens out, many at a time, with one model and one memory; a library, without HTTP."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence

from openk3.config.serve import EngineConfig
from openk3.engine.hybrid_cache import RequestTooLarge
from openk3.engine.job import Job
from openk3.engine.loop import Loop
from openk3.engine.prompt import read_prompt
from openk3.engine.request import Completion, Request, SamplingParams
from openk3.engine.stats import Stats, stats_of
from openk3.engine.store import Store
from openk3.engine.stream import Listener, Stream, Update
from openk3.engine.weights_names import WeightsNames, require_same_kind
from openk3.model.capture import has_kernels, is_plain
from openk3.model.k3 import K3

LOG = logging.getLogger(__name__)


class Engine:
    """Submit requests, then `step` until nothing is left, or let streams do that.

    Any thread may submit, cancel and step; one step runs at a time. Callbacks (listeners, constraints, `ready`) run
    inside a step: they may submit and cancel, but not step. An error of a request ends that request only.

    `weights_version` must name these weights and no others where prefixes outlive the engine (a tier with a folder or a
    `store`, which takes its place); without it, a digest of the weights is taken there.
    """

    def __init__(
        self, model: K3, config: EngineConfig, weights_version: str | None = None, *, store: Store | None = None
    ) -> None:
        self.config = config = resolved(config, model)
        self._names = WeightsNames(config, store)
        self._loop = Loop(model, config, self._names.name(model, weights_version), store)
        self._is_closed, self._lock = False, threading.Lock()
        self._stepper: int | None = None
        self._streams: dict[Job, Stream] = {}
        self._arrived, self._cancelled = deque[Stream](), deque[Stream]()

    def submit(self, request: Request, listener: Listener | None = None) -> Stream:
        """Take a request; the next step begins with it.

        `listener` is told of each step's news, in the thread that steps; if it raises, its request is cancelled.
        Raises ValueError for a request that this model cannot read, RequestTooLarge for one that never fits.
        """
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        prompt, books = read_prompt(request, self._loop.runner.model), self._loop.books
        if len(prompt.token_ids) > books.largest_request:
            most = books.largest_request
            raise RequestTooLarge(f"prompt: {len(prompt.token_ids)} tokens do not fit; there is room for {most}")
        seed = request.params.seed
        chain = books.name(prompt.token_ids, tenant=request.tenant, images=prompt.spans)
        job = Job(request, prompt, secrets.randbits(64) if seed is None else seed, list(prompt.token_ids), chain)
        stream = Stream(self, job, listener)
        self._arrived.append(stream)
        return stream

    def cancel(self, stream: Stream) -> None:
        """End a request: at once, or, while a step is under way, when the next one begins."""
        self._cancelled.append(stream)
        if self._lock.acquire(blocking=False):
            try:
                self._take_in()
                self._deliver()
            finally:
                self._lock.release()

    def step(self) -> list[Update]:
        """One pass for as many requests as there is time and room for, if any; the news, told to listeners too."""
        self._require_outside("step")
        with self._lock:
            self._stepper = threading.get_ident()
            try:
                self._take_in()
                self._loop.step()
                return self._deliver()
            finally:
                self._stepper = None

    def close(self, *, write: bool = True) -> None:
        """Cancel what is left, refuse what comes, and `write` cached prefixes to the store, if there is one."""
        self._require_outside("close")
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._take_in()
                self._loop.close(write=write)
                self._deliver()

    def prepare(self) -> int:
        """Make the CUDA graphs of decoding passes ahead; how many: 0 where these run kernel by kernel."""
        with self._lock:
            decode = self._loop.runner.decode
            return 0 if decode is None else decode.prepare()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Whole answers, in order; one that failed says so in its `finish`. Raises what `submit` raises."""
        streams = list[Stream]()
        try:
            for request in requests:
                streams.append(self.submit(request))
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                if stream.finish is None:
                    stream.cancel()

    def score(self, prompts: Sequence[Sequence[int]], tenant: str = "") -> list[list[float]]:
        """Log-probability of each token of each prompt but the first, given those before it. Raises what fails."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        return [_scores(each) for each in self.generate([Request(prompt, params, tenant=tenant) for prompt in prompts])]

    def load_weights(self, model: K3, version: str | None = None) -> None:
        """Go on with a model whose weights are new; another one of the same kind, or the same one changed in place.

        Nothing computed before is found by requests that start from now on; those that run go on with what they have.
        `version` names the weights, as in the constructor. Raises ValueError if the model differs in more than its
        weights, or if there is a tier and the name is the one before.
        """
        require_same_kind(self._loop.runner.model, model)
        name = self._names.next(model, version, self._loop.books.weights_version)
        with self._lock:
            self._loop.runner.model = model
            self._loop.books.new_weights(name)
            for job in self._loop.scheduler.running:
                job.features.clear()

    @property
    def is_idle(self) -> bool:
        """Whether a step has nothing to do: no request is here, and none is to be cancelled."""
        return not (self._arrived or self._cancelled or self._streams)

    def stats(self) -> Stats:
        """How it is doing now."""
        return stats_of(self._loop, len(self._arrived))

    def check(self) -> None:
        """Assert every invariant of jobs and pages: for tests, and for an engine that is idle."""
        with self._lock:
            self._loop.scheduler.check()
            assert self._loop.scheduler.running or not self._loop.books.pool.num_held, "pages are held by nobody"
            if self._loop.tier is not None:
                self._loop.tier.check()

    def _require_outside(self, verb: str) -> None:
        if self._stepper == threading.get_ident():
            raise RuntimeError(f"a callback cannot {verb} the engine that called it")

    def _take_in(self) -> None:
        """What has been submitted and cancelled since the last step."""
        while self._arrived:
            stream = self._arrived.popleft()
            self._streams[stream.job] = stream
            self._loop.add(stream.job)
        while self._cancelled:
            job = self._cancelled.popleft().job
            if job in self._loop:
                self._loop.end(job, "cancelled")

    def _deliver(self) -> list[Update]:
        updates = []
        for job, news in self._loop.take_news().items():
            stream = self._streams[job] if news.finish is None else self._streams.pop(job)
            updates.append(Update(stream, tuple(news.tokens), tuple(news.prompt_tokens), news.finish))
            stream.take(updates[-1])
        self._cancelled.extend(update.stream for update in updates if not _tell(update))
        return updates


def resolved(config: EngineConfig, model: K3) -> EngineConfig:
    """With what suits where the model lies, for what was left open."""
    gpu = model.embed.weight.is_cuda
    graphs = gpu and config.speculation is None and is_plain(model) and has_kernels(model)
    return config.on(gpu=gpu, graphs=graphs)


def _tell(update: Update) -> bool:
    """Whether the listener, if there is one, has taken it."""
    if update.stream.listener is not None:
        try:
            update.stream.listener(update)
        except Exception:  # foreign code
            LOG.exception("a listener failed; its request is cancelled")
            return False
    return True


def _scores(answer: Completion) -> list[float]:
    if answer.finish.error is not None:
        raise answer.finish.error
    return [token.logprob for token in answer.prompt_tokens]
