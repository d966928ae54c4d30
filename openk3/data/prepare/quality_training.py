"""Training of the quality model: logistic regression by scikit-learn on good and bad texts, with a held-out figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from openk3.data.documents import DataError
from openk3.data.prepare.domains import label
from openk3.data.prepare.measures import Measures
from openk3.data.prepare.quality import KINDS, NUM_FEATURES, READ, SCALE, Linear, Quality
from openk3.data.prepare.words import features
from openk3.data.sources import is_held_out

FEWEST = 20  # texts of each side
HELD_OUT_PERCENT = 10


class Sample(NamedTuple):
    """One text, whether it is good, and where it lies."""

    text: str
    is_good: bool
    where: str
    suffix: str = ""


class Figures(NamedTuple):
    """Held-out texts of a kind: how many of each side are judged rightly at 0.5, and the area under the ROC curve."""

    num_train: int
    num_held_out: int
    good_kept: float
    bad_dropped: float
    auc: float


def train(
    samples: Iterable[Sample], *, language: str = "any", strength: float = 10.0, about: str = ""
) -> tuple[Quality, dict[str, Figures]]:
    """A model for prose and one for code, from the texts of that kind; and how each does on texts held out.

    A text's kind is its domain label; its side of the split is the md5 of its place. Raises DataError if neither kind
    has 20 good and 20 bad texts.
    """
    groups: dict[str, list[Sample]] = {kind: [] for kind in KINDS}
    for sample in samples:
        domain = label(Measures(sample.text), sample.suffix)
        groups["code" if domain == "code" else "prose"].append(sample)
    models, figures = {}, {}
    for kind, group in groups.items():
        sides = [sum(sample.is_good == side for sample in group) for side in (True, False)]
        if min(sides) >= FEWEST:
            models[kind], figures[kind] = _fit(group, strength)
    if not models:
        sizes = ", ".join(f"{len(group)} of {kind}" for kind, group in groups.items())
        raise DataError(f"--good, --bad: too few texts ({sizes}); give at least {FEWEST} good and bad of one kind")
    measured = {kind: figure._asdict() for kind, figure in figures.items()}
    card = {"language": language, "suffixes": _suffixes(groups["code"]), "about": about, "held_out": measured}
    return Quality(models, card), figures


def _suffixes(group: Sequence[Sample]) -> list[str]:
    """Those of enough good pieces of code."""
    counts = Counter(sample.suffix for sample in group if sample.is_good)
    return sorted(suffix for suffix, count in counts.items() if count >= FEWEST)


def _fit(group: Sequence[Sample], strength: float) -> tuple[Linear, Figures]:
    held = np.array([is_held_out(sample.where, HELD_OUT_PERCENT) for sample in group])
    good = np.array([sample.is_good for sample in group])
    for side in (True, False):  # small groups may fall on one side
        places = np.flatnonzero(good == side)
        if held[places].all() or not held[places].any():
            held[places] = np.arange(len(places)) % 10 == 0
    hashes = [Measures(sample.text).token_hashes[:READ] for sample in group]
    matrix = _matrix(hashes)
    model = LogisticRegression(C=strength, class_weight="balanced", max_iter=500)
    model.fit(matrix[~held], good[~held])
    fitted = Linear(model.coef_[0].astype(np.float16).astype(np.float32), float(model.intercept_[0]))
    scores = np.array([fitted.score(one) for one, out in zip(hashes, held, strict=True) if out])
    truth = good[held]
    return fitted, Figures(
        int((~held).sum()),
        int(held.sum()),
        float((scores[truth] >= 0.5).mean()),
        float((scores[~truth] < 0.5).mean()),
        float(roc_auc_score(truth, scores)),
    )


def _matrix(hashes: Sequence[np.ndarray]) -> csr_matrix:
    """One row per text: SCALE times the share of each feature; float32 [texts, NUM_FEATURES]."""
    indices = [features(one, NUM_FEATURES) for one in hashes]
    values = [np.full(len(row), SCALE / max(len(row), 1), np.float32) for row in indices]
    starts = np.cumsum([0, *map(len, indices)])
    shape = (len(hashes), NUM_FEATURES)
    matrix = csr_matrix((np.concatenate(values), np.concatenate(indices), starts), shape=shape)
    matrix.sum_duplicates()
    return matrix
