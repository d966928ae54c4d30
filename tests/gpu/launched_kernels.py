"""Run operations that have kernels at the size of real layers, and say which compiled kernels that took.

python tests/gpu/launched_kernels.py [PART ...]

Prints JSON: for each variant its name, its spills on this GPU, and whether `compile_cases` of its module has it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ops"), str(ROOT / "tests" / "gpu")]

from kda_kernel_checks import Case, call, cotangents, everything, kernel_inputs  # noqa: E402
from kernel_compile import kernel_files, load, source_of  # noqa: E402

from openk3.ops.kda.fused_backward import checkpointed_kda, fused_kda  # noqa: E402


def run_kda(case: Case) -> None:
    """Training and prefill, with and without a state; checkpoints."""
    for state in (True, False):
        values = kernel_inputs(case, "cuda")
        if not state:
            del values["state"]
        everything(fused_kda, values, case, cotangents(case, "cuda"))
        with torch.no_grad():
            call(fused_kda, values, case)
            call(lambda *xs, **named: checkpointed_kda(xs[:5], xs[5], (1, 100), **named), values, case)


def run_decoding() -> None:
    """Steps, verification and replay, of few and of many requests."""
    import test_kda_decode_gpu as decoding

    for H, N in ((96, 1), (12, 64)):
        draw = decoding.Draw(H)
        weights, pool, slots = draw.weights(), draw.pool(N), draw.slots(N, N)
        tokens, gate, kept = draw.tokens(N), draw.gate(N), draw.tokens(N, decoding.DRAFTS)
        count = torch.ones(N, dtype=torch.int32, device="cuda")
        options: dict[str, Any] = {"cu_seqlens": torch.arange(N + 1, dtype=torch.int32, device="cuda")}
        decoding.decode_kda(tokens, gate, weights, pool, slots)
        decoding.decode_kda(tokens, gate, weights, pool, slots, into=decoding.copy(pool))
        decoding.verify_kda(tokens, gate, weights, pool, slots, **options)
        decoding.verify_kda(tokens, gate, weights, pool, slots, kept=kept, **options)
        decoding.verify_kda(tokens, gate, weights, pool, slots, kept=kept, accepted_N=count, **options)
        decoding.replay_kda(kept, weights, pool, slots, count)
        decoding.replay_kda(tokens, weights, pool, slots, count, **options)
        bare = [draw.normal(N, H, decoding.K) for _ in range(4)] + [draw.normal(N, H)]
        decoding.step_kda_in_place(*bare, gate=weights.gate, state_SHKV=pool.state_SHKV, slot_N=slots)


def run_convolutions() -> None:
    """The three of a layer at once, with and without windows and gradients."""
    from openk3.ops.short_conv import short_convs

    for lengths in ([2048], [300, 0, 1, 900]):
        bounds = torch.tensor([0, *lengths]).cumsum(0).cuda()
        xs = [torch.randn(sum(lengths), 12_288, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
        weights = [torch.randn(12_288, 4, device="cuda").requires_grad_() for _ in range(3)]
        windows = [torch.randn(len(lengths), 12_288, 4, device="cuda").bfloat16() for _ in range(3)]
        for given in (None, windows):
            ys, _ = short_convs(xs, weights, windows_NCW=given, cu_seqlens=bounds)
            torch.autograd.grad(sum(y.float().sum() for y in ys), [*xs, *weights])


def run_latent_moe() -> None:
    """Experts with many rows, some and few, the projections in one launch, counting, and SiTU by itself."""
    from openk3.ops.latent_moe.experts_fused import Form, mix_experts, tile_rows
    from openk3.ops.latent_moe.project_fused import router_logits
    from openk3.ops.latent_moe.route_fused import Choice, logits_gradient, route, sort
    from openk3.ops.margins import count_margins
    from openk3.ops.situ import situ_glu

    choice, form = Choice(8, True, 1.0), Form(4.0, 25.0, 1e-5)
    for T, C, I, grad in (
        (2048, 3584, 3072, True),
        (2048, 512, 512, True),
        (1024, 512, 512, True),
        (128, 512, 512, False),
    ):
        routed = route(torch.randn(T, 128, device="cuda"), torch.zeros(128, device="cuda"), choice, with_scores=grad)
        shapes = ((T, C), (128, I, C), (128, I, C), (128, C, I), (C,))
        z, w1, w3, w2, norm = (torch.randn(x, device="cuda", dtype=torch.bfloat16).requires_grad_(grad) for x in shapes)
        weights = routed.weights_Tk.detach().requires_grad_(grad)
        out = mix_experts(z, weights, sort(routed, tile_rows(z, 8, 128)), (w1, w3, w2), (norm, form))
        if grad:
            torch.autograd.grad(out, [z, weights, w1, w3, w2, norm], torch.ones_like(out))
            logits_gradient(weights.detach(), routed, choice, torch.bfloat16)
            counts = torch.zeros(128, 1000, dtype=torch.int64, device="cuda")
            range_2 = torch.tensor([-1.0, 0.002], dtype=torch.float64, device="cuda")
            count_margins(counts, routed.scores_TE, routed.threshold_T, range_2)
    for T, D, E in ((512, 7168, 896), (512, 1024, 128), (1, 1024, 128)):
        x, router = (torch.randn(n, D, device="cuda", dtype=torch.bfloat16) for n in (T, E))
        router_logits(x, router)
    gate, up = torch.randn(2, 100, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
    torch.autograd.grad(situ_glu(gate, up, 4.0, 25.0).sum(), (gate, up))


def run_depth() -> None:
    """Depth reads of layers and of the output, forward and backward; phase one for a block's queries, and a merge."""
    from openk3.ops.attn_res import inter_block, merge_normed, mix_depth, mix_depth_normed

    rows = [torch.randn(300, 7168, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(10)]
    query, norm, out = (torch.randn(7168, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    for L in (2, 5, 9):
        found = mix_depth_normed(rows[:L], query, norm, out, 1e-5, addend_TD=rows[9])
        torch.autograd.grad((found.normed_TD.sum() + found.newest_TD.sum()), [query, norm, out, *rows[:L], rows[9]])
    torch.autograd.grad(mix_depth(rows[:9], query, norm, 1e-5)[0].sum(), [query, norm, *rows[:9]])
    for width, L, Q in ((7168, 8, 24), (768, 4, 8)):
        some = [x[:, :width].detach().contiguous().requires_grad_() for x in rows]
        query, norm, out = (torch.randn(width, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        with torch.no_grad():
            vectors = torch.randn(Q, width, device="cuda")
            one = inter_block(some[:L], vectors, 1e-5, dtype=torch.bfloat16)
            first = one[0][0], one[1][0], one[2][0]
            merge_normed(first, some[8], vectors[0], out, eps=1e-5, addend_TD=some[9])
    for count in (2, 5):
        found = mix_depth_normed(some[:count], query, norm, out, 1e-5, addend_TD=some[9])
        torch.autograd.grad(found.normed_TD.sum() + found.newest_TD.sum(), [query, norm, out, *some[:count], some[9]])


def run_mla() -> None:
    """Causal attention of 96 heads, forward and backward; decoding and verification over pages of latents."""
    from openk3.ops.mla.latent_decode import LatentPages, latent_attention
    from openk3.ops.mla.reference import joint_attention

    q, kv = (torch.randn(700, 96, n, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (192, 256))
    latent = torch.randn(700, 576, device="cuda", dtype=torch.bfloat16).requires_grad_()
    cu = torch.tensor([0, 300, 700])
    o, _ = joint_attention(q, kv, latent[:, 512:], cu, scale=0.07, return_max=True)
    torch.autograd.grad(o, [q, kv, latent], torch.randn_like(o))
    pages = torch.randn(4, 6144, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(4, dtype=torch.int32, device="cuda").view(2, 2)
    lengths = torch.tensor([7000, 100], dtype=torch.int32, device="cuda")
    where = LatentPages.of_pages(pages, table, lengths)
    for H in (96, 24, 8):
        queries = (torch.randn(2, H, n, device="cuda", dtype=torch.bfloat16) for n in (512, 192))
        q_latent, q_shared = (x[..., -64:] if x.shape[2] == 192 else x for x in queries)
        bounds = torch.arange(3, dtype=torch.int32, device="cuda")
        latent_attention(q_latent, q_shared, where, bounds, scale=0.07, new_tokens=1)


def run_head() -> None:
    """The loss of a large vocabulary, alone and with gradients; log-probabilities and entropies."""
    from openk3.ops.cross_entropy import linear_cross_entropy, token_logprobs

    h, weight = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (700, 163_840))
    labels = torch.arange(700, device="cuda")
    torch.autograd.grad(linear_cross_entropy(h, weight, labels, chunk=384)[0], (h, weight))
    logprob, entropy = token_logprobs(h, weight, labels, chunk=384)
    torch.autograd.grad(logprob.sum() + entropy.sum(), (h, weight))
    torch.autograd.grad(token_logprobs(h, weight, labels, chunk=384)[0].sum(), (h, weight))
    with torch.no_grad():
        linear_cross_entropy(h, weight, labels, chunk=384)
        token_logprobs(h, weight, labels, chunk=384)


def run_muon() -> None:
    """Two steps of every kind of weight of a layer, and Newton-Schulz by itself."""
    from test_optimizer_gpu import WEIGHTS, train

    from openk3.ops.newton_schulz import newton_schulz

    train(2, names=[name for name in WEIGHTS if "odd" not in name and name != "tall heads"])
    for shape in ((8, 128, 7168), (4, 7168, 128), (2, 512, 1024), (2, 1024, 512)):
        newton_schulz(torch.randn(shape, device="cuda", dtype=torch.bfloat16))


def run_norms() -> None:
    """Norms of K3's width and of latents beside a shared key, of gated heads; the output gate of attention."""
    from openk3.ops.norm import gated_rms_norm, rms_norm
    from openk3.ops.sigmoid_gate import sigmoid_gate

    wide, latents = (torch.randn(300, n, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (7168, 576))
    for x in (wide, latents[:, :512]):
        weight = torch.randn(x.shape[1], device="cuda", dtype=torch.bfloat16).requires_grad_()
        torch.autograd.grad(rms_norm(x, weight, 1e-5).sum(), (x, weight))
    o, gate = (torch.randn(300, 96, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    weight = torch.randn(128, device="cuda").requires_grad_()
    torch.autograd.grad(gated_rms_norm(o, gate, weight, 1e-5).sum(), (o, gate, weight))
    torch.autograd.grad(sigmoid_gate(o.float(), gate, torch.bfloat16).sum(), (o, gate))


def key(kernel: Any, source: Any, options: dict[str, int]) -> str:
    """What makes a variant: types and constants of its arguments, and how it is launched."""
    constants = sorted((path, str(value)) for path, value in source.constants.items())
    signature = [str(source.signature[p.name]) for p in kernel.params]
    warps = None if kernel.is_gluon() else options["num_warps"]  # what is compiled counts those of all partitions
    return repr((signature, constants, warps, options["num_stages"]))


def launched(arch: int) -> Iterator[dict[str, Any]]:
    """Every compiled variant of every kernel."""
    for path in kernel_files():
        module = load(path)
        cases: dict[Any, set[str]] = {}
        if arch == 90 or not path.stem.endswith("_gluon"):
            for kernel, arguments, options in module.compile_cases(arch):
                defaults = {"num_warps": 4, "num_stages": 3} | options
                cases.setdefault(kernel, set()).add(key(kernel, source_of(kernel, arguments), defaults))
        for kernel in {id(x): x for x in vars(module).values() if hasattr(x, "device_caches")}.values():
            for compiled, *_ in kernel.device_caches.values():
                for variant in compiled.values():
                    name = key(kernel, variant.src, variant.metadata._asdict())
                    yield {
                        "kernel": f"{path.stem}.{kernel.__name__}",
                        "variant": name,
                        "spills": variant.n_spills,
                        "checked": name in cases.get(kernel, ()),
                    }


PARTS: dict[str, Callable[[], None]] = {
    "kda": partial(run_kda, Case((2048,), H=96)),
    "kda_packed": partial(run_kda, Case((700, 0, 333), H=96)),
    "kda_cut": partial(run_kda, Case((40000,), H=2)),  # among multiprocessors
    "kda_long": partial(run_kda, Case((40000,), H=12)),  # few heads, more tiles than a slab
    "kda_uneven": partial(run_kda, Case((8192, 100), H=12)),
    "kda_decode": run_decoding,
    "convolutions": run_convolutions,
    "latent_moe": run_latent_moe,
    "depth": run_depth,
    "mla": run_mla,
    "head": run_head,
    "muon": run_muon,
    "norms": run_norms,
}


def main() -> None:
    """Run the parts that are named, or all, then print."""
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
    major, minor = torch.cuda.get_device_capability()
    print(json.dumps(list(launched(10 * major + minor))))


if __name__ == "__main__":
    main()
