"""Trace: where the forward pass hands out what it computed, and Recorder, which keeps all of it.

A statistic exists only because the caller passed a trace: evaluation and recomputed activations pass none, so they
can never move a router bias or an attention clip.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor

from openk3.ops.routing import Routes
from openk3.ops.saved import recomputes


class Trace:
    """Every hook of the forward pass, doing nothing. Subclasses override what they want.

    `layer` is 0-based; the MTP layer's is the number of backbone layers. Values still carry their graph.
    """

    def wants(self, name: str) -> bool:
        """Whether to compute what only a trace needs: 'max_logit', 'depth', 'decay' or 'layer_out'."""
        return False

    def routing(self, layer: int, scores_TE: Tensor, bias_E: Tensor, routes: Routes) -> None:
        """A router's scores, the bias it chose with, and its choice."""

    def max_logit(self, layer: int, max_H: Tensor) -> None:
        """Largest scaled causal attention logit of each MLA head, for QK-Clip."""

    def depth(self, layer: int, site: str, probs_TL: Tensor) -> None:
        """Depth weights of a read: site 'mixer', 'ffn' or 'output'; sources oldest first, running block last."""

    def decay(self, layer: int, g_THK: Tensor) -> None:
        """Log decay of a KDA layer."""

    def mixer_out(self, layer: int, y_TD: Tensor) -> None:
        """What the token mixer adds."""

    def ffn_out(self, layer: int, y_TD: Tensor) -> None:
        """What the feed-forward part adds."""

    def layer_out(self, layer: int, prefix_TD: Tensor) -> None:
        """The running block sum as it leaves the layer."""


NO_TRACE = Trace()


@contextmanager
def once(trace: Trace, group: str) -> Generator[Trace]:
    """What to give to a part that the backward pass may run again: `trace` hears of the run inside this block alone."""
    if trace is NO_TRACE or not recomputes(group):
        yield trace
        return
    first = _FirstRun(trace)
    yield first
    first.trace = NO_TRACE


class _FirstRun(Trace):
    """Hands everything on, and answers a second run what it did the first, so that the same is computed again."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._answers: dict[str, bool] = {}

    def wants(self, name: str) -> bool:
        """As the trace did when it was first asked."""
        return self._answers.setdefault(name, self.trace.wants(name))

    def routing(self, layer: int, scores_TE: Tensor, bias_E: Tensor, routes: Routes) -> None:
        """Hand on."""
        self.trace.routing(layer, scores_TE, bias_E, routes)

    def max_logit(self, layer: int, max_H: Tensor) -> None:
        """Hand on."""
        self.trace.max_logit(layer, max_H)

    def decay(self, layer: int, g_THK: Tensor) -> None:
        """Hand on."""
        self.trace.decay(layer, g_THK)


class Recorder(Trace):
    """Keeps the last forward pass, detached: one dictionary per hook, keyed by layer (depth: by layer and site)."""

    def __init__(self) -> None:
        self.scores: dict[int, Tensor] = {}
        self.biases: dict[int, Tensor] = {}
        self.routes: dict[int, Routes] = {}
        self.max_logits: dict[int, Tensor] = {}
        self.depths: dict[tuple[int, str], Tensor] = {}
        self.decays: dict[int, Tensor] = {}
        self.mixer_outs: dict[int, Tensor] = {}
        self.ffn_outs: dict[int, Tensor] = {}
        self.layer_outs: dict[int, Tensor] = {}

    def wants(self, name: str) -> bool:
        """Everything."""
        return True

    def routing(self, layer: int, scores_TE: Tensor, bias_E: Tensor, routes: Routes) -> None:
        """Copies, because a training step replaces the bias in place."""
        self.scores[layer] = scores_TE.detach()
        self.biases[layer] = bias_E.detach().clone()
        ids_Tk, weights_Tk, threshold_T, load_E = routes
        self.routes[layer] = Routes(ids_Tk.detach(), weights_Tk.detach(), threshold_T.detach(), load_E)

    def max_logit(self, layer: int, max_H: Tensor) -> None:
        """Keep."""
        self.max_logits[layer] = max_H.detach()

    def depth(self, layer: int, site: str, probs_TL: Tensor) -> None:
        """Keep."""
        self.depths[layer, site] = probs_TL.detach()

    def decay(self, layer: int, g_THK: Tensor) -> None:
        """Keep."""
        self.decays[layer] = g_THK.detach()

    def mixer_out(self, layer: int, y_TD: Tensor) -> None:
        """Keep."""
        self.mixer_outs[layer] = y_TD.detach()

    def ffn_out(self, layer: int, y_TD: Tensor) -> None:
        """Keep."""
        self.ffn_outs[layer] = y_TD.detach()

    def layer_out(self, layer: int, prefix_TD: Tensor) -> None:
        """Keep."""
        self.layer_outs[layer] = prefix_TD.detach()
