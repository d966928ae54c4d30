"""Quantile Balancing: router biases for the next step from this step's scores (report section 2.3.3, Appendix D)."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from openk3.config.train import BalanceConfig
from openk3.model.moe import LatentMoE, Router
from openk3.model.trace import Trace
from openk3.ops.margins import count_margins
from openk3.ops.norm import at_least_float32
from openk3.ops.routing import Routes


def exact_bias(scores_TE: Tensor, threshold_T: Tensor, k: int) -> Tensor:
    """The next bias_E, mean zero, from every margin of a step (eqs. 13-14).

    threshold_T is alpha, the (k+1)-th largest biased score of each token. Expert j's bias is minus the (q+1)-th
    largest margin s_ij - alpha_i over the m tokens, q = m k / E: exactly q margins lie above it.
    """
    margins_TE = scores_TE - threshold_T.unsqueeze(1)
    tokens, experts = margins_TE.shape
    rank = min(tokens * k // experts + 1, tokens)
    bias_E = -margins_TE.kthvalue(tokens - rank + 1, dim=0).values
    return bias_E - bias_E.mean()


def histogram_bias(counts_EB: Tensor, low: float | Tensor, width: float | Tensor, k: int) -> Tensor:
    """The next bias_E, mean zero, from counts of required biases in bins [low + b width, low + (b+1) width) (App. D).

    The quantile lies in the first bin whose cumulative count reaches ceil(q), and is linear inside it.
    """
    q = counts_EB[0].sum().double() * k / len(counts_EB)
    upto_EB = counts_EB.cumsum(1)
    bin_E = (upto_EB < q.ceil()).sum(1, keepdim=True)
    count_E = counts_EB.gather(1, bin_E)
    before_E = upto_EB.gather(1, bin_E) - count_E
    inside_E = ((q - before_E.double()) / count_E.double()).clamp(0, 1)
    bias_E = low + (bin_E.double() + inside_E).squeeze(1) * width
    return bias_E - bias_E.mean()


@dataclass
class Histogram:
    """Integer counts of the required biases r = alpha_i - s_ij of one layer, one row of bins per expert.

    r lies in [min bias - 1, max bias + 1] because scores lie in (0, 1); the range is fixed by the bias of the step.
    Counting never waits for a GPU.
    """

    counts_EB: Tensor
    range_2: Tensor | None = None  # float64: where the first bin begins, width of a bin

    def add(self, scores_TE: Tensor, bias_E: Tensor, threshold_T: Tensor) -> None:
        """Count a micro-batch in one pass."""
        if self.range_2 is None:
            lowest, highest = torch.aminmax(bias_E)
            width = (highest - lowest + 2).double() / self.counts_EB.shape[1]
            self.range_2 = torch.stack((lowest.double() - 1, width))
        count_margins(self.counts_EB, scores_TE, threshold_T, self.range_2)

    @property
    def low(self) -> float:
        """Where the first bin begins."""
        return -1.0 if self.range_2 is None else float(self.range_2[0])

    @property
    def width(self) -> float:
        """Of a bin; 0 before anything was counted."""
        return 0.0 if self.range_2 is None else float(self.range_2[1])

    def bias(self, k: int) -> Tensor:
        """The next bias_E."""
        low, width = (-1.0, 0.0) if self.range_2 is None else self.range_2
        return histogram_bias(self.counts_EB, low, width, k)

    def bias_or(self, bias_E: Tensor, k: int) -> Tensor:
        """The next bias_E, or the given one if no token was counted."""
        return torch.where(self.counts_EB[0].sum() > 0, self.bias(k).to(bias_E), bias_E)

    @property
    def num_tokens(self) -> int:
        """Tokens counted so far."""
        return int(self.counts_EB[0].sum())

    def reset(self) -> None:
        """Forget the step."""
        self.counts_EB.zero_()
        self.range_2 = None


@dataclass
class Margins:
    """Every score and threshold of one layer's step: the exact form, for small runs and as the yardstick."""

    scores: list[Tensor] = field(default_factory=list)
    thresholds: list[Tensor] = field(default_factory=list)

    def add(self, scores_TE: Tensor, bias_E: Tensor, threshold_T: Tensor) -> None:
        """Keep a micro-batch."""
        self.scores.append(scores_TE)
        self.thresholds.append(threshold_T)

    def bias(self, k: int) -> Tensor:
        """The next bias_E."""
        return exact_bias(torch.cat(self.scores), torch.cat(self.thresholds), k)

    def bias_or(self, bias_E: Tensor, k: int) -> Tensor:
        """The next bias_E, or the given one if no token was kept."""
        return self.bias(k).to(bias_E) if self.num_tokens else bias_E

    @property
    def num_tokens(self) -> int:
        """Tokens kept so far."""
        return sum(len(scores) for scores in self.scores)

    def reset(self) -> None:
        """Forget the step."""
        self.scores.clear()
        self.thresholds.clear()


class BalanceTrace(Trace):
    """Watches the routers of a model during training steps, and sets their biases between steps.

    Scores count only between `open()` and `close()`, which the optimizer step puts around each forward pass: neither
    evaluation nor a forward pass that the backward pass repeats is counted. No bias changes but in `update`. Largest
    attention logits are collected on the way, for QK-Clip.
    """

    def __init__(self, model: nn.Module, config: BalanceConfig, *, max_logits: bool = True) -> None:
        self.routers: dict[int, Router] = {}
        for module in model.modules():
            if isinstance(module, LatentMoE):
                self.routers[module.layer] = module.router
        self.statistics: dict[int, Histogram | Margins] = {
            layer: self._empty(router, config) for layer, router in self.routers.items()
        }
        self.loads: dict[int, Tensor] = {}
        self.max_logits: dict[int, Tensor] = {}
        self._wants_max_logits, self._ema = max_logits, config.ema
        self.num_updates = 0
        # Threads of one step have their passes open and closed by themselves, and count one at a time.
        self._open: set[int] = set()
        self._counting = threading.Lock()

    @staticmethod
    def _empty(router: Router, config: BalanceConfig) -> Histogram | Margins:
        if config.method == "exact":
            return Margins()
        bias_E = router.bias
        return Histogram(torch.zeros(len(bias_E), config.bins, dtype=torch.int64, device=bias_E.device))

    def open(self) -> None:
        """Count from here on."""
        self._open.add(threading.get_ident())

    def close(self) -> None:
        """Ignore what follows."""
        self._open.discard(threading.get_ident())

    @property
    def _counts(self) -> bool:
        """Whether this thread's pass is counted."""
        return threading.get_ident() in self._open

    def wants(self, name: str) -> bool:
        """Attention logits, if QK-Clip is on."""
        return name == "max_logit" and self._wants_max_logits and self._counts

    @torch.no_grad()
    def routing(self, layer: int, scores_TE: Tensor, bias_E: Tensor, routes: Routes) -> None:
        """Count one router's micro-batch."""
        if not self._counts or not len(scores_TE):
            return
        scores_TE, threshold_T = at_least_float32(scores_TE.detach()), routes.threshold_T
        load_E = routes.load_E
        if load_E is None:
            ids = routes.expert_ids_Tk.flatten()
            # Unlike bincount it does not ask a GPU for the largest.
            load_E = ids.new_zeros(scores_TE.shape[1]).scatter_add_(0, ids, torch.ones_like(ids))
        with self._counting:
            self.statistics[layer].add(scores_TE, bias_E, at_least_float32(threshold_T))
            self.loads[layer] = self.loads[layer] + load_E if layer in self.loads else load_E

    @torch.no_grad()
    def max_logit(self, layer: int, max_H: Tensor) -> None:
        """Keep the largest of the step."""
        if self._counts:
            max_H = max_H.detach()
            with self._counting:
                self.max_logits[layer] = torch.maximum(self.max_logits.get(layer, max_H), max_H)

    @torch.no_grad()
    def update(self) -> None:
        """Set every router's bias for the next step and forget this one. Routers that saw no token keep theirs.

        With `ema`, the first steps are averaged evenly, so that the average never leans on the initial bias.
        """
        self.num_updates += 1
        new = max(1 - self._ema, 1 / self.num_updates)
        for layer, router in self.routers.items():
            # With every expert chosen there is nothing to balance, and no (k+1)-th score.
            if router.k < len(router.bias):
                router.bias.lerp_(self.statistics[layer].bias_or(router.bias, router.k), new)
        self.reset()

    def reset(self) -> None:
        """Forget the step that is being counted."""
        for statistic in self.statistics.values():
            statistic.reset()
        self.loads, self.max_logits = {}, {}
        self._open.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Updates so far; histograms and their ranges by layer, zero between steps, the counts so far inside one."""
        state: dict[str, Tensor] = {"updates": torch.tensor(self.num_updates)}
        for layer, statistic in self.statistics.items():
            if isinstance(statistic, Histogram):
                state[f"{layer}.counts"] = statistic.counts_EB
                empty = torch.tensor([-1.0, 0.0], dtype=torch.float64)
                state[f"{layer}.range"] = empty if statistic.range_2 is None else statistic.range_2.cpu()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""
        self.num_updates = int(state["updates"])
        for layer, statistic in self.statistics.items():
            if isinstance(statistic, Histogram):
                statistic.counts_EB.copy_(state[f"{layer}.counts"])
                given = state[f"{layer}.range"].to(statistic.counts_EB.device, torch.float64)
                statistic.range_2 = given if float(given[1]) > 0 else None

    def imbalance(self) -> tuple[float, float]:
        """(largest, mean over layers) of max/mean expert load in the step that is being counted; 0 without routers."""
        return largest_and_mean(self.ratios())

    def ratios(self) -> Tensor:
        """Max/mean expert load of each layer in the step that is being counted."""
        if not self.loads:
            return torch.empty(0)
        loads_LE = torch.stack(list(self.loads.values())).double()
        return loads_LE.amax(1) / loads_LE.mean(1)


def largest_and_mean(ratios_L: Tensor) -> tuple[float, float]:
    """Of layers that had tokens; 0 without any."""
    ratios = [ratio for ratio in ratios_L.tolist() if not math.isnan(ratio)]  # a layer without tokens has 0 / 0
    return (max(ratios), sum(ratios) / len(ratios)) if ratios else (0.0, 0.0)
