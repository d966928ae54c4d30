"""NgramDraft: what followed the same tokens earlier in the request, be it prompt or answer (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from openk3.engine.draft import Passed
from openk3.engine.job import Job, Work
from openk3.model.trace import NO_TRACE

LONGEST, SHORTEST = 4, 2  # tokens that must agree; the longest match counts, and of those the last one
WINDOW = 1 << 16  # tokens that are searched, in less than a tenth of a millisecond


class NgramDraft:
    """Costs no pass; pays where an answer repeats its prompt or itself: code that is edited, quotations, tables."""

    one_by_one = False
    trace = NO_TRACE

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Job, bytearray] = WeakKeyDictionary()

    def observe(self, passed: Passed) -> None:
        """Tokens are all that it reads."""

    def propose(self, works: Sequence[Work]) -> list[list[int]]:
        """Of each work's job; nothing where its last tokens are new."""
        return [self._continue(work.job, work.num_drafts) for work in works]

    def _continue(self, job: Job, count: int) -> list[int]:
        text = self._texts.setdefault(job, bytearray())
        text += np.array(job.token_ids[len(text) // 4 :], dtype=np.int32).tobytes()
        ids = np.frombuffer(text, dtype=np.int32)[-WINDOW:]
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # of earlier occurrences
        matches = ends[:0]
        for length in range(2, LONGEST + 1):
            ends = ends[ends >= length - 1]
            ends = ends[ids[ends - length + 1] == ids[-length]] if len(ids) > length else ends[:0]
            matches = ends if len(ends) and length >= SHORTEST else matches
        return _copy(ids, int(matches[-1]) + 1, count) if len(matches) else []


def _copy(ids: np.ndarray, start: int, count: int) -> list[int]:
    """Tokens from `start` on, and where they end, the copy itself: a loop goes on as a loop."""
    copied = ids[start : start + count].tolist()
    while len(copied) < count:
        copied.append(copied[len(copied) - (len(ids) - start)])
    return copied
