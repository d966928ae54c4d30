"""Speed on a CPU against the token recurrence and transformers' Kimi Linear, in one process and as ratios.

    python benchmarks/cpu.py            # both sections
    python benchmarks/cpu.py kda        # chunkwise KDA, forward and backward
    python benchmarks/cpu.py model      # a text model, forward and backward

Protocol: two threads, OMP_WAIT_POLICY=PASSIVE, variants interleaved, minimum of five rounds, machine load printed. The
process is tuned as the training commands tune theirs (openk3/runtime/cpu.py), which speeds up every variant's matrix
products; --untuned leaves torch as it comes. transformers is a peer to compare with, never a dependency: run with an
interpreter that has it, or its rows are left out and said to be.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Read when torch is loaded; passive waiting lets a busy machine's other work run between parallel parts.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from openk3 import K3, Packed  # noqa: E402
from openk3.commands.conditions import commit, processor  # noqa: E402
from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, schedule  # noqa: E402
from openk3.ops import KdaGate, chunk_kda, recurrent_kda  # noqa: E402
from openk3.ops.kda.reference import kda_gate  # noqa: E402
from openk3.runtime.cpu import tune_cpu  # noqa: E402
from openk3.runtime.run_folder import write_json  # noqa: E402

Variant = Callable[[], Any]
OURS, RECURRENCE, PEER_KDA = "openk3 chunk_kda", "openk3 recurrent_kda", "transformers chunk_kimi_delta_attention"
OUR_MODEL, PEER_MODEL = "openk3 K3", "transformers kimi_linear"
TARGETS = {(RECURRENCE, OURS): 12.0, (PEER_KDA, OURS): 10.0, (PEER_MODEL, OUR_MODEL): 2.5}


def peer() -> Any:
    """transformers' kimi_linear modelling module, or None where it is not installed."""
    try:
        from transformers.models.kimi_linear import modeling_kimi_linear
    except ImportError:
        return None
    return modeling_kimi_linear


def kda_variants(T: int = 2048, H: int = 8, D: int = 128) -> dict[str, Variant]:
    """One sequence forward and backward, gradients of all inputs; the peer gets its gate and beta ready-made."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(T, H, D, generator=generator).requires_grad_() for _ in range(4))
    beta = torch.randn(T, H, generator=generator).requires_grad_()
    A_log, dt_bias = torch.zeros(H, requires_grad=True), torch.full((H, D), -3.0, requires_grad=True)
    d_o = torch.randn(T, H, D, generator=generator)
    gate = KdaGate(A_log, dt_bias)

    def ours(op: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Variant:
        leaves = (q, k, v, z, beta, A_log, dt_bias)
        return lambda: torch.autograd.grad(op(q, k, v, z, beta, gate)[0], leaves, d_o)

    variants = {OURS: ours(chunk_kda), RECURRENCE: ours(recurrent_kda)}
    modelling = peer()
    if modelling is not None:
        g, b = kda_gate(z, gate).detach().requires_grad_(), beta.sigmoid().detach().requires_grad_()
        rows = [x.detach()[None].requires_grad_() for x in (q, k, v, g, b)]

        def theirs() -> None:
            o, _ = modelling.chunk_kimi_delta_attention(*rows, use_qk_l2norm_in_kernel=True)
            torch.autograd.grad(o, rows, d_o[None])

        variants[PEER_KDA] = theirs
        with torch.no_grad():
            want = chunk_kda(q, k, v, z, beta, gate)[0]
            got = modelling.chunk_kimi_delta_attention(*rows, use_qk_l2norm_in_kernel=True)[0][0]
        assert (got - want).abs().max() < 1e-4, "the peer computes something else"
    return variants


def kda_floor(T: int = 2048, H: int = 8, D: int = 128, C: int = 64) -> dict[str, float]:
    """Operations of chunkwise KDA, and the least time they take at the rate of a plain batched product."""
    forward = T * H * (6 * D * D + 8 * C * D)
    backward = T * H * (12 * D * D + 16 * C * D)
    a, b = torch.randn(T * H // (2 * C), 2 * C, D), torch.randn(T * H // (2 * C), D, D)
    out = torch.empty_like(a)
    seconds = min(timed(lambda: torch.bmm(a, b, out=out)) for _ in range(20))
    rate = 2 * T * H * D * D / seconds
    return {"gflop": (forward + backward) / 1e9, "bmm_gflops": rate / 1e9, "floor_s": (forward + backward) / rate}


def text_config() -> ModelConfig:
    """Width 256, 9 layers, 4 heads of 64, 32 experts of which 4 work."""
    kda, full = schedule(9)
    text = TextConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=9,
        num_attention_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        linear_attn_config=LinearAttnConfig(head_dim=64, num_heads=4, kda_layers=kda, full_attn_layers=full),
        attn_res_block_size=3,
        num_experts=32,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=256,
        routed_expert_hidden_size=256,
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "media_placeholder_token_id": 3}
    return ModelConfig(text=text, vision=None, **ids)


def model_variants(batch: int = 4, length: int = 512) -> dict[str, Variant]:
    """Text models of the same sizes, loss forward and backward; ours also carries AttnRes and latent projections."""
    config = text_config()
    text = config.text
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, text.vocab_size, (batch, length), generator=generator)
    model = K3.build(config, seed=0, dtype=torch.float32, device="cpu")
    packed = Packed.join(ids.tolist())

    def ours() -> None:
        model.zero_grad()
        model.loss(packed).total.backward()

    variants: dict[str, Variant] = {OUR_MODEL: ours}
    modelling = peer()
    if modelling is not None:
        from transformers import KimiLinearConfig

        same = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
        same += ("num_attention_heads", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
        theirs_config = KimiLinearConfig(
            **{name: getattr(text, name) for name in (*same, "v_head_dim")},
            num_local_experts=text.num_experts,
            num_experts_per_tok=text.num_experts_per_token,
            n_shared_experts=text.num_shared_experts,
            num_key_value_heads=text.num_attention_heads,
            linear_head_dim=64,
            linear_num_heads=4,
            layer_types=["full_attention" if kind == "mla" else "linear_attention" for kind in text.layer_kinds()],
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        other = modelling.KimiLinearForCausalLM(theirs_config)

        def theirs() -> None:
            other.zero_grad()
            other(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        variants[PEER_MODEL] = theirs
        counts = (sum(p.numel() for p in each.parameters()) for each in (model, other))
        print("\nparameters: openk3 {:,}, transformers {:,}".format(*counts))
    return variants


def timed(variant: Variant) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    variant()
    return time.perf_counter() - start


def measure(variants: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round, one after the other within a round; the first round warms up, too."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            gc.collect()
            seconds[name].append(timed(variant))
    return seconds


def report(section: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Print the minimum of each variant and the ratios to ours; both as a record."""
    best = {name: min(rounds) for name, rounds in seconds.items()}
    print(f"\n{section}")
    for name, value in best.items():
        spread = f"{min(seconds[name]):.4f} .. {max(seconds[name]):.4f}"
        print(f"  {name:<42}{value * 1e3:>10.1f} ms   (rounds {spread} s)")
    ratios = {}
    for (slow, fast), target in TARGETS.items():
        if fast not in best:
            continue
        if slow not in best:
            print(f"  {slow}: not measured, transformers is not installed here")
            continue
        ratio = best[slow] / best[fast]
        ratios[f"{slow} / {fast}"] = {"ratio": ratio, "target": target}
        print(f"  {slow} / {fast} = {ratio:.1f}  (target {target:g}: {'met' if ratio >= target else 'MISSED'})")
    return {"best_s": best, "rounds_s": seconds, "ratios": ratios}


def conditions(tuned: dict[str, bool]) -> dict[str, Any]:
    """What a number means nothing without: machine, commit, versions, settings."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    modelling = peer()
    if modelling is not None:
        versions["transformers"] = sys.modules["transformers"].__version__
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit(),
        "cpu": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "OMP_WAIT_POLICY": os.environ["OMP_WAIT_POLICY"],
        "tuned": tuned,
        "versions": versions,
    }


def main() -> None:
    """Measure the sections asked for, print, and merge the record into the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=["kda", "model", []], help="default: both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--untuned", action="store_true", help="leave torch's CPU settings as they come")
    parser.add_argument("--out", type=Path, help="default: results/cpu.json beside this file, or cpu_untuned.json")
    flags = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    settings = conditions({} if flags.untuned else tune_cpu())
    print("\n".join(f"{name}: {value}" for name, value in settings.items()))
    out = flags.out or Path(__file__).parent / "results" / ("cpu_untuned.json" if flags.untuned else "cpu.json")
    results = json.loads(out.read_text()) if out.exists() else {}
    for section in flags.sections or ("kda", "model"):
        before = os.getloadavg()[0]
        record = report(section, measure(kda_variants() if section == "kda" else model_variants(), flags.rounds))
        if section == "kda":
            record["floor"] = kda_floor()
            words = "  floor: {gflop:.2f} GFLOP at the {bmm_gflops:.0f} GFLOP/s of a batched product = {floor_s:.4f} s"
            print(words.format(**record["floor"]))
        record["load"] = [before, os.getloadavg()[0]]
        print(f"  load average {record['load'][0]:.2f} before, {record['load'][1]:.2f} after")
        results[section] = settings | record
    write_json(out, results)
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
