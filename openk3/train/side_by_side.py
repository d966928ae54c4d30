"""Several micro-batches at once, each on a thread of its own: how a small model keeps more than one CPU core busy.

The operations of a small model are too short to be split over cores, but two micro-batches do not depend on each other.
Gradients come back to the caller and are added up in the order of the micro-batches, so that the number of threads
changes the speed and not one bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

Job = Callable[[], Tensor]


def gradients_in_order(jobs: Sequence[Job], inputs: Sequence[Tensor], workers: int) -> Iterator[list[Tensor | None]]:
    """For each job, in order, the gradients of the scalar that it returns with respect to `inputs`; None where unused.

    `workers` jobs run at a time, each with one thread for its operations. An exception of a job is raised here, after
    the jobs that had begun have ended.
    """

    def gradients(job: Job) -> list[Tensor | None]:
        return list(torch.autograd.grad(job(), inputs, allow_unused=True))

    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for start in range(0, len(jobs), workers):
            # A round at a time bounds how many micro-batches of gradients are held.
            yield from pool.map(gradients, jobs[start : start + workers])
