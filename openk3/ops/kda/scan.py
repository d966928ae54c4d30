"""From chunk to chunk of Kimi Delta Attention: the state forward in time, its gradient backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.kda.plan import ChunkPlan


@dataclass(frozen=True)
class Steps:
    """States [matrices of the step, K, V] that enter and leave each step of the scan."""

    entering: list[Tensor]
    leaving: list[Tensor]

    def part(self, steps: slice) -> "Steps":
        """Some of the steps."""
        return Steps(self.entering[steps], self.leaving[steps])


def lay_out_states(plan: ChunkPlan, first: Tensor, keep: bool) -> tuple[Steps, Tensor]:
    """Steps whose leaving states are yet to be filled in, and the memory behind the leaving ones.

    first [N * H, K, V] enters, longest sequence first. With `keep` every step has its own memory; without, all steps
    are rows of one buffer, where a sequence's state stays when it ends.
    """
    sizes = plan.sizes
    if not keep:
        buffer = first.clone()
        rows = [buffer[:size] for size in sizes]
        return Steps(rows, rows), buffer
    memory = first.new_empty(sum(sizes), *first.shape[1:])
    return kept_steps(plan, first, memory), memory


def kept_steps(plan: ChunkPlan, first: Tensor, memory: Tensor) -> Steps:
    """The steps of `lay_out_states` where every step has its own rows of `memory`."""
    leaving = list(memory.split(plan.sizes))
    return Steps([state[:size] for state, size in zip([first, *leaving], plan.sizes)], leaving)


def final_states(plan: ChunkPlan, first: Tensor, steps: Steps) -> Tensor:
    """State of each sequence after its last step, longest sequence first, where every step was kept."""
    ended = [state[size:] for state, size in zip([first, *steps.leaving], [*plan.sizes, 0])]
    return torch.cat(ended[::-1])


@dataclass(frozen=True)
class Chunks:
    """What the scans need of each chunk and head of a block (X = chunks * H, step by step)."""

    sizes: list[int]  # matrices of each step
    read: Tensor  # [X, 2C, K] what the state entering adds to the errors, then to the outputs
    leave: Tensor  # [X, C, K] rows that write the state leaving the chunk
    total: Tensor  # [X, K, 1] decay of the whole chunk


def scan_forward(chunks: Chunks, solved: Tensor, states: Steps) -> Tensor:
    """Walk a block's steps, all sequences side by side, and fill in the states that leave each.

    solved [X, 2C, V] holds errors and outputs as if each chunk began with a state of zeros, and is completed in place:
    errors are the values corrected by what the state already knew. Returns a copy of the errors [X, C, V].
    """
    C = chunks.leave.shape[1]
    errors = solved.new_empty(len(solved), C, solved.shape[2])
    rows = (solved, solved[:, :C], errors, chunks.read, chunks.leave.mT, chunks.total)
    parts = zip(states.entering, states.leaving, *(x.split(chunks.sizes) for x in rows))
    for entering, leaving, both, first, error, read, leave, total in parts:
        both.baddbmm_(read, entering)
        error.copy_(first)
        torch.mul(entering, total, out=leaving).baddbmm_(leave, error)
    return errors


@dataclass(frozen=True)
class ScanGradients:
    """Gradients that the backward scan of a block yields; that of the state is carried on in place."""

    read: Tensor  # [X, 2C, K]
    leave: Tensor  # [X, C, K]
    solved: Tensor  # [X, 2C, V]
    carried: Tensor  # [X, K] of the log decay of the whole chunk, through the state leaving it


def scan_backward(chunks: Chunks, d_outputs: Tensor, errors: Tensor, states: Steps, d_state: Tensor) -> ScanGradients:
    """Walk a block's steps backward in time; d_outputs [X, C, V], errors as `scan_forward` returned them.

    d_state [N * H, K, V] is the gradient of the states leaving the block and becomes that of those entering it; a
    sequence that ends inside finds its final state's gradient in its place.
    """
    (X, C, V), K = errors.shape, d_state.shape[1]
    most = chunks.sizes[0]
    d_solved = errors.new_empty(X, 2 * C, V)
    d_solved[:, C:] = d_outputs
    d_read, d_leave, carried = errors.new_empty(X, 2 * C, K), torch.empty_like(chunks.leave), errors.new_empty(X, K)
    product, d_error = errors.new_empty(most, K, V), errors.new_empty(most, C, V)
    rows = (errors, d_solved, d_solved[:, :C], d_read, d_leave, carried, chunks.read.mT, chunks.leave, chunks.total)
    parts = zip(chunks.sizes, states.entering, states.leaving, *(x.split(chunks.sizes) for x in rows))
    for n, entering, leaving, error, both, first, to_read, to_leave, to_carried, read, leave, total in reversed(
        list(parts)
    ):
        d_leaving = d_state[:n]
        torch.sum(torch.mul(d_leaving, leaving, out=product[:n]), -1, out=to_carried)
        torch.bmm(error, d_leaving.mT, out=to_leave)
        first.copy_(torch.bmm(leave, d_leaving, out=d_error[:n]))
        torch.bmm(both, entering.mT, out=to_read)
        d_leaving.mul_(total).baddbmm_(read, both)
    return ScanGradients(d_read, d_leave, d_solved, carried)
