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
    enter: Tensor  # [X, 2C, K] rows that read the state entering the chunk: for each tile its queries, then its keys
    leave: Tensor  # [X, C, K] rows that write the state leaving the chunk
    total: Tensor  # [X, K, 1] decay of the whole chunk
    inverse: Tensor  # [X, C, C] (I + scores of keys)^-1


def scan_forward(chunks: Chunks, values: Tensor, states: Steps) -> tuple[Tensor, Tensor]:
    """Walk a block's steps, all sequences side by side, and fill in the states that leave each.

    values [X, tiles, tile, V]. Returns what the entering states hold for the queries, like values; and errors
    [X, C, V], the values corrected by what the state already knew.
    """
    X, num_tiles, tile, V = values.shape
    found = values.new_empty(X, num_tiles, 2, tile, V)
    unknown, errors = torch.empty_like(values), values.new_empty(X, num_tiles * tile, V)
    rows = (values, found[:, :, 1], unknown, found.view(X, -1, V), unknown.view(errors.shape), errors)
    rows += (chunks.enter, chunks.leave.mT, chunks.total, chunks.inverse)
    parts = zip(states.entering, states.leaving, *(x.split(chunks.sizes) for x in rows))
    for entering, leaving, value, known, new, all_found, new_rows, error, enter, leave, total, inverse in parts:
        torch.bmm(enter, entering, out=all_found)
        torch.sub(value, known, out=new)
        torch.bmm(inverse, new_rows, out=error)
        torch.mul(entering, total, out=leaving).baddbmm_(leave, error)
    return found[:, :, 0], errors


@dataclass(frozen=True)
class ScanGradients:
    """Gradients that the backward scan of a block yields; that of the state is carried on in place."""

    enter: Tensor  # [X, 2C, K]
    leave: Tensor  # [X, C, K]
    values: Tensor  # [X, C, V]
    found: Tensor  # [X, 2C, V] of what the enter rows read: for each tile the outputs', then minus the values'
    carried: Tensor  # [X, K] of the log decay of the whole chunk, through the state leaving it


def scan_backward(
    chunks: Chunks, gradients: tuple[Tensor, Tensor, Tensor], errors: Tensor, states: Steps
) -> ScanGradients:
    """Walk a block's steps backward in time.

    gradients: of the outputs [X, tiles, tile, V]; of the errors through the outputs [X, C, V], used up; and of the
    states leaving the block [N * H, K, V], which becomes that of the states entering it, where a sequence that ends
    inside finds its final state's gradient in its place.
    """
    d_outputs, d_errors, d_state = gradients
    (X, num_tiles, tile, V), most = d_outputs.shape, chunks.sizes[0]
    found = errors.new_empty(X, num_tiles, 2, tile, V)
    found[:, :, 0] = d_outputs
    d_values, product = torch.empty_like(errors), torch.empty_like(d_state[:most])
    d_enter, d_leave = torch.empty_like(chunks.enter), torch.empty_like(chunks.leave)
    carried = errors.new_empty(X, d_leave.shape[2])
    rows = (errors, d_errors, d_values, d_values.view(d_outputs.shape), found[:, :, 1], found.view(X, -1, V))
    rows += (d_enter, d_leave, carried, chunks.enter.mT, chunks.leave, chunks.total, chunks.inverse.mT)
    parts = zip(chunks.sizes, states.entering, states.leaving, *(x.split(chunks.sizes) for x in rows))
    for n, entering, leaving, error, d_error, d_value, d_value_tiles, minus, both, *rest in reversed(list(parts)):
        to_enter, to_leave, to_carried, enter, leave, total, inverse = rest
        d_leaving = d_state[:n]
        torch.sum(torch.mul(d_leaving, leaving, out=product[:n]), -1, out=to_carried)
        torch.bmm(error, d_leaving.mT, out=to_leave)
        torch.bmm(inverse, d_error.baddbmm_(leave, d_leaving), out=d_value)
        torch.neg(d_value_tiles, out=minus)
        torch.bmm(both, entering.mT, out=to_enter)
        d_leaving.mul_(total).baddbmm_(enter, both)
    return ScanGradients(d_enter, d_leave, d_values, found.view(X, -1, V), carried)
