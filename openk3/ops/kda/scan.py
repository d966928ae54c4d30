"""From chunk to chunk of Kimi Delta Attention: the state forward in time, its gradient backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.kda.plan import ChunkPlan


@dataclass(frozen=True)
class Chunks:
    """What the scans need of each chunk and head (X = M * H, chunk-major)."""

    plan: ChunkPlan
    enter: Tensor  # [X, 2C, K] rows that read the state entering the chunk: for each tile its queries, then its keys
    leave: Tensor  # [X, C, K] rows that write the state leaving the chunk
    total: Tensor  # [X, K, 1] decay of the whole chunk
    query: Tensor  # [X, C, C] scores of queries
    inverse: Tensor  # [X, C, C] (I + scores of keys)^-1


@dataclass(frozen=True)
class Past:
    """What the forward scan leaves for the backward one."""

    initial: Tensor  # [N, H, K, V] states before the first chunk
    errors: Tensor  # [X, C, V] values corrected by what the state already knew, solved within the chunk
    states: Tensor  # [X, K, V] after each chunk; only the last two steps' where no gradient was asked for


def scan_forward(
    chunks: Chunks, values_MHCV: Tensor, state_NHKV: Tensor, *, tile: int, keep: bool
) -> tuple[Tensor, Tensor, Past]:
    """Run the chunks of all sequences side by side.

    Returns outputs [M, H, C, V], final states [N, H, K, V] and the Past; `keep` it for the backward scan.
    """
    plan, (M, H, C, V), K = chunks.plan, values_MHCV.shape, state_NHKV.shape[2]
    most = plan.active[0] * H
    outputs = torch.empty_like(values_MHCV)
    errors = values_MHCV.new_empty(M * H, C, V)
    states = values_MHCV.new_empty(M * H if keep else 2 * most, K, V)
    found = values_MHCV.new_empty(most, 2 * C, V)
    local = values_MHCV.new_empty(most, C, V)
    state = plan.sort(state_NHKV).reshape(-1, K, V)
    finals = []
    done = 0
    for step, count in enumerate(plan.active):
        n, tokens, here = count * H, slice(done, done + count), slice(done * H, (done + count) * H)
        finals.append(state[n:].clone())
        state, known, own = state[:n], found[:n], local[:n]
        torch.bmm(chunks.enter[here], state, out=known)
        known = known.view(count, H, -1, 2, tile, V)
        torch.sub(
            values_MHCV[tokens].view(count, H, -1, tile, V), known[:, :, :, 1], out=own.view(count, H, -1, tile, V)
        )
        error = torch.bmm(chunks.inverse[here], own, out=errors[here])
        torch.bmm(chunks.query[here], error, out=own)
        torch.add(own.view(count, H, -1, tile, V), known[:, :, :, 0], out=outputs[tokens].view(count, H, -1, tile, V))
        slot = done * H if keep else (step % 2) * most
        after = torch.mul(state, chunks.total[here], out=states[slot : slot + n])
        state = after.baddbmm_(chunks.leave[here].mT, error)
        done += count
    finals.append(state)
    final = plan.unsort(torch.cat(finals[::-1]).view(state_NHKV.shape))
    return outputs, final, Past(state_NHKV, errors, states)


@dataclass(frozen=True)
class ScanGradients:
    """Gradients that one backward scan yields."""

    enter: Tensor  # [X, 2C, K]
    leave: Tensor  # [X, C, K]
    carried: Tensor  # [X, K] of the log decay of the whole chunk, through the state leaving it
    found: Tensor  # [X, 2C, V] of what the enter rows read: for each tile the outputs', then minus the values'
    state: Tensor  # [N, H, K, V] of the initial state


def scan_backward(chunks: Chunks, d_outputs: Tensor, d_final: Tensor, past: Past) -> ScanGradients:
    """Walk the chunks backward in time; d_outputs [M, H, tiles, tile, V], d_final [N, H, K, V]."""
    initial, errors, states = past.initial, past.errors, past.states
    plan, (M, H, num_tiles, tile, V), K = chunks.plan, d_outputs.shape, initial.shape[2]
    C = num_tiles * tile
    found = errors.new_empty(M, H, num_tiles, 2, tile, V)
    found[:, :, :, 0] = d_outputs
    d_values, d_found = found[:, :, :, 1], found.view(-1, 2 * C, V)
    d_errors = torch.bmm(chunks.query.mT, d_outputs.view(-1, C, V))
    d_enter, d_leave = torch.empty_like(chunks.enter), torch.empty_like(chunks.leave)
    carried = errors.new_empty(M * H, K)
    first = plan.sort(initial).reshape(-1, K, V)
    d_states = plan.sort(d_final).reshape(-1, K, V).clone()
    solved = errors.new_empty(plan.active[0] * H, C, V)
    product = errors.new_empty(plan.active[0] * H, K, V)
    done = M
    for step in range(len(plan.active) - 1, -1, -1):
        count = plan.active[step]
        done -= count
        n, here = count * H, slice(done * H, (done + count) * H)
        previous = (done - plan.active[step - 1]) * H
        before = states[previous : previous + n] if step else first[:n]
        d_state = d_states[:n]
        torch.sum(torch.mul(d_state, states[here], out=product[:n]), -1, out=carried[here])
        torch.bmm(errors[here], d_state.mT, out=d_leave[here])
        d_error = d_errors[here].baddbmm_(chunks.leave[here], d_state)
        torch.bmm(chunks.inverse[here].mT, d_error, out=solved[:n])
        torch.neg(solved[:n].view(count, H, num_tiles, tile, V), out=d_values[done : done + count])
        torch.bmm(d_found[here], before.mT, out=d_enter[here])
        d_state.mul_(chunks.total[here]).baddbmm_(chunks.enter[here].mT, d_found[here])
    d_initial = plan.unsort(d_states.view(initial.shape))
    return ScanGradients(d_enter, d_leave, carried, d_found, d_initial)
