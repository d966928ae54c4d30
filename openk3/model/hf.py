"""Load and save a model in the released checkpoint layout, one tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from openk3.config.model import ModelConfig
from openk3.model import hf_card
from openk3.model.accounting import check_mxfp4_widths
from openk3.model.hf_files import INDEX, CheckpointError, CheckpointReader
from openk3.model.hf_names import units
from openk3.model.hf_storage import (
    SHARD_BYTES,
    FileSource,
    ModelSource,
    Storage,
    check_layout,
    packed_experts,
    write_weights,
)
from openk3.model.packed_experts import LEAVES
from openk3.ops.mxfp import quantize_mxfp4
from openk3.runtime.staging import staged_folder

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"}

Model = TypeVar("Model", bound=nn.Module)


def from_pretrained(
    empty: Callable[..., Model],
    directory: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    experts: str | None = None,
) -> Model:
    """A model with the weights of a released-layout folder: bf16, float32 or MXFP4.

    `empty(config, dtype=, device=, packed=)` allocates it (`K3.empty`); convolution taps, KDA output norms,
    decay parameters and router biases stay at least float32. `experts` None unpacks routed experts, "mxfp4" keeps or
    makes them packed. Raises ConfigError or CheckpointError naming the file that is missing, damaged or does not fit.
    """
    if experts not in (None, "mxfp4"):
        raise CheckpointError(f"experts: {experts!r} is not one of None, 'mxfp4'")
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such folder; expected a checkpoint folder")
    config = ModelConfig.from_dict(hf_card.read_config_data(directory))
    with CheckpointReader(directory) as reader:
        check_layout(reader, config)
        model = empty(config, dtype=dtype, device=device, packed=experts == "mxfp4")
        _check_model(model, config)
        _fill(model, config, reader)
    return model


def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Copy a checkpoint folder into `model` (its `config` attribute says what must be there), in place.

    One tensor is held at a time beside the model. Raises CheckpointError as `from_pretrained` does.
    """
    config: ModelConfig = model.config  # pyrefly: ignore
    _check_model(model, config)
    with CheckpointReader(directory) as reader:
        check_layout(reader, config)
        _fill(model, config, reader)


def _check_model(model: nn.Module, config: ModelConfig) -> None:
    known, there = {stored.ours for unit in units(config) for stored in unit.tensors}, set(model.state_dict())
    for path, module in packed_experts(model).items():
        there -= {f"{path}.{name}" for name, _ in module.named_buffers()}
        there |= {f"{path}.{leaf}" for leaf in LEAVES}
    if known != there:
        raise RuntimeError(f"model and checkpoint layout disagree on {sorted(known ^ there)[:8]}")


@torch.no_grad()
def _fill(model: nn.Module, config: ModelConfig, reader: CheckpointReader) -> None:
    state, source, packed = model.state_dict(), FileSource(reader), packed_experts(model)
    for unit in units(config):
        for stored in unit.tensors:
            path, _, leaf = stored.ours.rpartition(".")
            if stored.expert is not None and path in packed:
                codes = source.packed(stored) or quantize_mxfp4(source.weight(stored), signed_zero=True)
                packed[path].load(leaf, stored.expert, *codes)
                continue
            target = state[stored.ours]
            target = target if stored.expert is None else target[stored.expert]
            target.copy_(source.weight(stored)[: stored.real].reshape(target.shape))


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    experts: str = "bf16",
    dtype: str | None = None,
    scale_rule: str = "even",
    shard_bytes: int = SHARD_BYTES,
    card: str = "",
    also: Callable[[Path], object] | None = None,
) -> None:
    """Write `model` as a checkpoint folder in the released layout, whole or not at all.

    `experts` stores the routed experts as "mxfp4", "bf16" or "float32"; `dtype` the rest as "bf16" or "float32"
    (default: float32 with float32 experts, else bf16 as released). float32 values are rounded to nearest even.
    `card` is a paragraph for the model card; `also(folder)` may write more files (a tokenizer) before the folder
    takes its name. An earlier checkpoint of this project is replaced; its other files are kept. Raises FolderError
    for a folder that holds anything else, CheckpointError or ConfigError for storage that cannot be.
    """
    config: ModelConfig = model.config  # pyrefly: ignore
    dtype = dtype or ("float32" if experts == "float32" else "bf16")
    storage = Storage(experts, dtype, scale_rule)
    if experts == "mxfp4":
        check_mxfp4_widths(config.text)
    directory = Path(directory)
    with staged_folder(directory, hf_card.is_ours) as folder:
        write_weights(folder, config, ModelSource(model), storage, shard_bytes=shard_bytes)
        data = hf_card.config_data(config.to_dict(), experts == "mxfp4", dtype)
        (folder / hf_card.CONFIG).write_text(hf_card.to_json(data), encoding="utf-8")
        (folder / hf_card.GENERATION).write_text(hf_card.to_json(hf_card.generation_data(config)), encoding="utf-8")
        (folder / hf_card.CARD).write_text(hf_card.model_card(config, experts, dtype, card), encoding="utf-8")
        if also is not None:
            also(folder)
        _keep_other_files(directory, folder, folders=True)


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    experts: str | None = None,
    dtype: str | None = None,
    scale_rule: str = "even",
    shard_bytes: int = SHARD_BYTES,
    on_progress: Callable[[int, int], object] | None = None,
) -> None:
    """Rewrite a released-layout folder with other dtypes, one tensor at a time, without building the model.

    `experts` and `dtype` as in `save_pretrained`; None keeps what each tensor has (packed experts byte for byte).
    Tokenizer and other files beside the weights are copied. `on_progress(done, total)` hears of the bytes written.
    Raises ConfigError, CheckpointError or FolderError.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise CheckpointError(f"{target}: cannot convert a checkpoint onto itself; choose another folder")
    storage = Storage(experts, dtype, scale_rule)
    with CheckpointReader(source) as reader:
        data = hf_card.read_config_data(source)
        config = ModelConfig.from_dict(data)
        if experts == "mxfp4":
            check_mxfp4_widths(config.text)
        check_layout(reader, config)
        files = FileSource(reader)
        packed = _stays_packed(files, config, storage)
        with staged_folder(target, hf_card.is_ours) as folder:
            write_weights(folder, config, files, storage, shard_bytes=shard_bytes, on_progress=on_progress)
            data = hf_card.config_data(data, packed, dtype)
            (folder / hf_card.CONFIG).write_text(hf_card.to_json(data), encoding="utf-8")
            labels = ("mxfp4" if packed else experts or str(data.get("dtype")), dtype or str(data.get("dtype")))
            (folder / hf_card.CARD).write_text(hf_card.model_card(config, *labels), encoding="utf-8")
            _keep_other_files(source, folder, folders=False)
            if not (folder / hf_card.GENERATION).exists():
                generation = hf_card.to_json(hf_card.generation_data(config))
                (folder / hf_card.GENERATION).write_text(generation, encoding="utf-8")


def _stays_packed(files: FileSource, config: ModelConfig, storage: Storage) -> bool:
    """Whether the routed experts come out packed; the release packs all of them or none."""
    experts = [stored for unit in units(config) for stored in unit.tensors if stored.expert is not None]
    found = {storage.packs(stored, files) for stored in experts}
    if len(found) > 1:
        raise CheckpointError(
            f"{files.reader.directory}: some experts are packed and some are not; name how to store them"
        )
    return found == {True}


def _keep_other_files(old: Path, new: Path, folders: bool) -> None:
    """Copy what lies in `old` and is neither weights nor written anew: tokenizer, preprocessor, licence."""
    for path in sorted(old.iterdir()) if old.is_dir() else ():
        written = path.suffix in _WEIGHT_SUFFIXES or path.name == INDEX or (new / path.name).exists()
        if written or path.name.startswith("."):
            continue
        if not path.is_dir():
            shutil.copy2(path, new / path.name)
        elif folders:
            shutil.copytree(path, new / path.name)
