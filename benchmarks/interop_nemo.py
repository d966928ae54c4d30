"""Exchange checkpoints with NeMo AutoModel 0.7.0's K3 in both directions on the CPU and print the largest differences.

Development only. In an environment of its own (Python 3.11), beside this project:

    pip install torch==2.13.0 triton==3.6.0 transformers==5.18.0 torchdata torchao pyyaml einops pillow
    pip install --no-deps nemo_automodel==0.7.0 fla-core==0.6.0 flash-linear-attention==0.6.0 megatron-fsdp==0.5.0
    PYTHONPATH=. python benchmarks/interop_nemo.py

NeMo's K3 calls FLA's GPU kernels for KDA. On a CPU they are replaced by FLA's own PyTorch recurrence and by two small
modules of the same weights; everything else (configuration, state-dict adapter, MXFP4 decoder, checkpoint reader and
writer, MLA, attention residuals, MoE, vision tower) is NeMo's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from openk3.config.model import ModelConfig
from openk3.inputs.packed import Packed
from openk3.model.k3 import K3

TOLERANCE = 1e-3
Media = tuple[torch.Tensor, tuple[int, int, int]]


class TorchConv(nn.Module):
    """Depthwise causal convolution and SiLU with the weight of FLA's ShortConvolution."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str, dtype: torch.dtype, **ignored: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size, dtype=dtype))

    def reset_parameters(self) -> None:
        """As FLA's: uniform in +-1/sqrt(taps)."""
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: torch.Tensor, **ignored: Any) -> tuple[torch.Tensor, None]:
        """[B, T, C] -> ([B, T, C], no state)."""
        padded = F.pad(x.transpose(1, 2).to(self.weight.dtype), (self.weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, groups=x.shape[-1])).transpose(1, 2).to(x.dtype), None


class TorchGatedNorm(nn.Module):
    """RMSNorm times sigmoid of the gate with the weight of FLA's FusedRMSNormGated."""

    def __init__(self, hidden_size: int, eps: float, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size, dtype=dtype)), eps

    def reset_parameters(self) -> None:
        """As FLA's: ones."""
        nn.init.ones_(self.weight)

    def forward(self, o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[B, T, H, V] each."""
        return F.rms_norm(o.float(), o.shape[-1:], self.weight.float(), self.eps) * gate.float().sigmoid()


def torch_kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **ignored: Any
) -> Any:
    """FLA's PyTorch recurrence on L2-normalised queries and keys."""
    from fla.ops.kda.naive import naive_recurrent_kda

    q, k = (x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return naive_recurrent_kda(q, k, v, g, beta)


def use_torch_kernels() -> None:
    """Put the replacements where NeMo's K3 looks its kernels up."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # FLA's modules can then be imported without a GPU driver
    warnings.filterwarnings("ignore")
    from nemo_automodel.components.models.kimi_k3 import model

    model.ShortConvolution, model.FusedRMSNormGated, model.chunk_kda = TorchConv, TorchGatedNorm, torch_kda


def nemo_empty(folder: Path, vision: bool) -> nn.Module:
    """NeMo's float32 K3 for the configuration in `folder`, weights not set."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.kimi_k3.config import KimiK3Config
    from nemo_automodel.components.models.kimi_k3.model import KimiK3ForCausalLM
    from nemo_automodel.components.models.kimi_k3.multimodal import KimiK3ForConditionalGeneration

    config = KimiK3Config.from_pretrained(folder)
    config.text_config.torch_dtype = config.torch_dtype = "float32"
    config.text_config.kda_use_fused_gate = False  # NeMo's own PyTorch gate
    config.vision_config._attn_implementation = "eager"  # the default is FlashAttention
    backend = BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch",
        experts="torch",
        dispatcher="torch",
        enable_fsdp_optimizations=False,
    )
    model = (KimiK3ForConditionalGeneration if vision else KimiK3ForCausalLM)(config, backend=backend)
    model.name_or_path = str(folder)
    return model.eval()


def nemo_checkpointer(folder: Path) -> Any:
    """NeMo's own reader and writer of Hugging Face checkpoints."""
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

    config = CheckpointingConfig(checkpoint_dir=folder, model_cache_dir=folder, save_consolidated=True)
    return Checkpointer(config, dp_rank=0, tp_rank=0, pp_rank=0)


def nemo_load(folder: Path, vision: bool) -> nn.Module:
    """A checkpoint folder through NeMo's checkpointer."""
    model = nemo_empty(folder, vision)
    for tensor in model.parameters():
        nn.init.constant_(tensor, float("nan"))  # what the checkpoint does not fill must show
    # Not load_base_model: for text-only models it renames KDA tensors as transformers' kimi_linear has them.
    nemo_checkpointer(folder).load_model(model, str(folder), is_init_step=True)
    return model


def nemo_save(model: nn.Module, folder: Path) -> Path:
    """Save through NeMo's checkpointer; returns the folder of its Hugging Face export."""
    nemo_checkpointer(folder).save_model(model, str(folder), is_final_checkpoint=True)
    return next(path.parent for path in folder.rglob("*.safetensors") if path.parent.name == "consolidated")


def inputs(config: ModelConfig) -> tuple[torch.Tensor, list[Media]]:
    """Two sequences of random ids, and with vision one image in each."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, config.text.vocab_size - 8, (2, 40), generator=generator)
    if config.vision is None:
        return ids, []
    grids = ((1, 8, 4), (1, 8, 4))
    images = [(torch.randint(-128, 128, (32, 3, 14, 14), generator=generator) / 128, grid) for grid in grids]
    ids[:, 5] = config.media_placeholder_token_id
    return ids, images


@torch.no_grad()
def largest_difference(ours: K3, theirs: nn.Module) -> dict[str, float]:
    """Logits of both on the same inputs."""
    ids, images = inputs(ours.config)
    mine = ours(Packed.join(ids, images=images))
    extra = {}
    if images:
        grids = torch.tensor([grid for _, grid in images])
        extra = {"pixel_values": torch.cat([pixels for pixels, _ in images]), "grid_thws": grids}
    out = theirs(ids, **extra)
    other = getattr(out, "logits", out).flatten(0, 1)
    difference = (mine - other).abs().max()
    return {"max_difference": float(difference), "logits_std": float(mine.std()), "tokens": len(mine)}


def ours_to_theirs(folder: Path, storage: dict[str, str], work: Path) -> dict[str, float]:
    """A model saved here, loaded by NeMo."""
    model = K3.from_pretrained(folder)
    model.save_pretrained(work, shard_bytes=300_000, **storage)
    return largest_difference(K3.from_pretrained(work), nemo_load(work, model.config.vision is not None))


def theirs_to_ours(folder: Path, work: Path) -> dict[str, float]:
    """A model that NeMo initialised and saved, loaded here."""
    vision = ModelConfig.from_json(folder).vision is not None
    model = nemo_empty(folder, vision)
    torch.manual_seed(7)
    model.initialize_weights(torch.device("cpu"), torch.float32)
    for name, tensor in model.named_parameters():
        if "vision_tower" in name or "mm_projector" in name:
            nn.init.normal_(tensor, std=0.05)
        elif "res_proj" in name or name.endswith("norm.weight"):
            tensor.data.add_(0.3 * torch.randn_like(tensor))  # fresh ones are constant and would hide a swap
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.1 * torch.randn_like(tensor))
    return largest_difference(K3.from_pretrained(nemo_save(model, work)), model)


def main() -> int:
    """Run every exchange; exit code 1 when a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--models", type=Path, default=root / "tests/golden", help="folder of small K3 checkpoints")
    parser.add_argument("--out", type=Path, default=root / "benchmarks/results/interop_nemo.json")
    args = parser.parse_args()
    use_torch_kernels()
    float32 = {"experts": "float32", "dtype": "float32"}
    exchanges: list[tuple[str, str, dict[str, str]]] = [
        *((name, "float32", float32) for name in ("text_a", "text_b", "mm_a")),
        ("text_b", "bf16", {"experts": "bf16"}),
        ("mxfp4_a", "MXFP4 experts, float32 rest", {"experts": "mxfp4", "dtype": "float32"}),
        ("mxfp4_a", "MXFP4 experts, bf16 rest", {"experts": "mxfp4"}),
    ]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for n, (name, label, storage) in enumerate(exchanges):
            result = ours_to_theirs(args.models / name, storage, Path(work) / f"out{n}")
            rows.append({"direction": "openk3 -> NeMo", "model": name, "storage": label, **result})
        for name in ("text_a", "text_b", "mm_a"):
            result = theirs_to_ours(args.models / name, Path(work) / f"in-{name}")
            rows.append({"direction": "NeMo -> openk3", "model": name, "storage": "as NeMo writes it", **result})
    for row in rows:
        print(
            f"{row['direction']:<15} {row['model']:<8} {row['storage']:<28} max difference {row['max_difference']:.2e}"
        )
    worst = max(row["max_difference"] for row in rows)
    passed = all(row["max_difference"] <= TOLERANCE for row in rows)
    print(f"largest {worst:.2e}, tolerance {TOLERANCE:.0e}: {'passed' if passed else 'FAILED'}")
    from importlib.metadata import version

    packages = {name: version(name) for name in ("nemo-automodel", "torch", "transformers", "fla-core", "safetensors")}
    report = {
        "tolerance": TOLERANCE,
        "passed": passed,
        "python": platform.python_version(),
        **packages,
        "results": rows,
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
