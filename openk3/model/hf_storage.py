"""How weights are stored in the released layout, and where a new checkpoint takes them from: a model or files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from openk3.config.model import ModelConfig
from openk3.model.hf_card import to_json
from openk3.model.hf_files import (
    INDEX,
    SINGLE,
    CheckpointError,
    CheckpointReader,
    Entry,
    file_order,
    split_units,
    write_safetensors,
)
from openk3.model.hf_names import StoredTensor, Unit, shared_copies, units
from openk3.model.packed_experts import PackedExperts
from openk3.ops.mxfp import dequantize_mxfp4, quantize_mxfp4

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
EXPERTS = ("mxfp4", *DTYPES)
SCALE_RULES = ("even", "floor", "ceil")
SHARD_BYTES = 5_000_000_000
ENOUGH = 10_000  # missing tensors after which the rest are not looked for


class Source(Protocol):
    """Where the weights of a new checkpoint come from."""

    def dtype(self, stored: StoredTensor) -> torch.dtype:
        """Dtype that the weight has there; uint8 for a packed one."""
        ...

    def weight(self, stored: StoredTensor) -> torch.Tensor:
        """The weight on the CPU, in the released shape."""
        ...

    def packed(self, stored: StoredTensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """MXFP4 codes and scale bytes if it is packed there."""
        ...


def packed_experts(model: nn.Module) -> dict[str, PackedExperts]:
    """The modules of a model that hold experts in MXFP4, by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, PackedExperts)}


class ModelSource:
    """The parameters of a model in memory."""

    def __init__(self, model: nn.Module):
        self.state = model.state_dict()
        self.experts = packed_experts(model)

    def dtype(self, stored: StoredTensor) -> torch.dtype:
        """Dtype of the parameter; uint8 for packed experts."""
        return torch.uint8 if self._holder(stored) is not None else self.state[stored.ours].dtype

    def weight(self, stored: StoredTensor) -> torch.Tensor:
        """The parameter (or one expert of it), reshaped and padded as released."""
        packed = self.packed(stored)
        if packed is not None:
            return dequantize_mxfp4(*packed)
        tensor = self.state[stored.ours]
        tensor = (tensor if stored.expert is None else tensor[stored.expert]).detach().cpu()
        return _pad(tensor, stored) if stored.real is not None else tensor.reshape(stored.shape)

    def packed(self, stored: StoredTensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes and scale bytes of an expert that is held so."""
        holder = self._holder(stored)
        if holder is None or stored.expert is None:
            return None
        return holder.stored(stored.ours.rpartition(".")[2], stored.expert)

    def _holder(self, stored: StoredTensor) -> PackedExperts | None:
        return None if stored.expert is None else self.experts.get(stored.ours.rpartition(".")[0])


class FileSource:
    """The tensors of a checkpoint on disk."""

    def __init__(self, reader: CheckpointReader):
        self.reader = reader

    def dtype(self, stored: StoredTensor) -> torch.dtype:
        """Dtype in the file."""
        return torch.uint8 if stored.packed in self.reader else self.reader.entry(stored.released).dtype

    def weight(self, stored: StoredTensor) -> torch.Tensor:
        """The tensor in the released shape: MXFP4 unpacked, an unpadded A_log padded. Raises CheckpointError.

        `check_layout` has compared its header with the configuration before.
        """
        packed = self.packed(stored)
        if packed is not None:
            return dequantize_mxfp4(*packed)
        tensor = self.reader.read(stored.released)
        if stored.real is None:
            return tensor
        if tensor[stored.real :].any():
            raise CheckpointError(f"{self._where(stored.released)} has non-zero entries after its {stored.real} heads")
        return _pad(tensor[: stored.real], stored)

    def packed(self, stored: StoredTensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes and scale bytes as stored."""
        if stored.packed not in self.reader:
            return None
        return self.reader.read(stored.packed), self.reader.read(stored.scale)

    def check(self, stored: StoredTensor) -> None:
        """Raise CheckpointError if the file announces another shape or dtype than `weight` and `packed` expect."""
        if stored.packed not in self.reader:
            shapes = [stored.shape] if stored.real is None else [stored.shape, (stored.real,)]
            if not self._announced(stored.released, *shapes).dtype.is_floating_point:
                where = self._where(stored.released)
                raise CheckpointError(f"{where} holds integers; expected floating-point values")
            return
        *rows, columns = stored.shape
        if columns % 32:
            raise CheckpointError(f"{self._where(stored.packed)} has rows of {columns}; MXFP4 packs 32 at a time")
        for name, width in ((stored.packed, columns // 2), (stored.scale, columns // 32)):
            entry = self._announced(name, (*rows, width))
            if entry.dtype != torch.uint8:
                raise CheckpointError(f"{self._where(name)} is {entry.dtype}; packed MXFP4 is stored as uint8")

    def _announced(self, name: str, *shapes: tuple[int, ...]) -> Entry:
        entry = self.reader.entry(name)
        if entry.shape not in shapes:
            found, wanted = list(entry.shape), list(shapes[0])
            raise CheckpointError(f"{self._where(name)} has shape {found}, but config.json asks for {wanted}")
        return entry

    def _where(self, name: str) -> str:
        return f"{self.reader.path(name)}: tensor {name}"


def _pad(tensor: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """A_log with zeros up to the stored length."""
    return nn.functional.pad(tensor, (0, stored.shape[0] - tensor.shape[0]))


@dataclass(frozen=True)
class Storage:
    """How to store weights: names out of EXPERTS and DTYPES, or None to keep what the source has."""

    experts: str | None
    dtype: str | None
    scale_rule: str = "even"

    def __post_init__(self) -> None:
        choices = (
            ("experts", self.experts, EXPERTS),
            ("dtype", self.dtype, tuple(DTYPES)),
            ("scale_rule", self.scale_rule, SCALE_RULES),
        )
        for name, value, allowed in choices:
            if value is not None and value not in allowed:
                raise CheckpointError(f"{name}: {value!r} is not one of {', '.join(allowed)}")

    def packs(self, stored: StoredTensor, source: Source) -> bool:
        """Whether to store this tensor as MXFP4."""
        if stored.expert is None:
            return False
        return self.experts == "mxfp4" or (self.experts is None and source.dtype(stored) == torch.uint8)

    def entries(self, stored: StoredTensor, source: Source) -> list[Entry]:
        """The tensors to write for this one."""
        if self.packs(stored, source):
            *rows, columns = stored.shape
            return [
                Entry(stored.packed, torch.uint8, (*rows, columns // 2)),
                Entry(stored.scale, torch.uint8, (*rows, columns // 32)),
            ]
        name = self.dtype if stored.expert is None else self.experts
        dtype = source.dtype(stored) if name is None else DTYPES[name]
        if stored.kept_float32:
            dtype = torch.float32
        return [Entry(stored.released, dtype, stored.shape)]

    def values(self, stored: StoredTensor, source: Source) -> tuple[torch.Tensor, ...]:
        """The data of `entries`, in the same order."""
        if self.packs(stored, source):
            return source.packed(stored) or quantize_mxfp4(source.weight(stored), self.scale_rule, signed_zero=True)
        return (source.weight(stored).to(self.entries(stored, source)[0].dtype),)


def check_layout(reader: CheckpointReader, config: ModelConfig) -> None:
    """Raise CheckpointError unless the files hold every tensor of `config` in its shape and nothing else.

    Only headers are read, so that a configuration that asks for more than the files hold costs no memory.
    """
    _check_names(reader, config)
    source = FileSource(reader)
    for unit in units(config):
        for stored in unit.tensors:
            source.check(stored)
    _check_copies(reader, config)


def _check_names(reader: CheckpointReader, config: ModelConfig) -> None:
    """Raise CheckpointError listing tensors that are missing or unexpected for `config`."""
    left = set(reader.index)
    missing: list[str] = []
    for unit in units(config):
        if len(missing) > ENOUGH:
            break
        for stored in unit.tensors:
            names = {stored.released}
            if stored.expert is not None and not names <= left:
                names = {stored.packed, stored.scale} if {stored.packed, stored.scale} & left else names
            missing += sorted(names - left)
            left -= names
    unexpected = [] if len(missing) > ENOUGH else sorted(left - set(shared_copies(config)))
    problems = [
        f"{len(names)} tensors {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise CheckpointError(f"{reader.directory}: does not match its config.json; {'; '.join(problems)}")


def _check_copies(reader: CheckpointReader, config: ModelConfig) -> None:
    """Raise CheckpointError when a tensor that some writers repeat differs from the one it repeats."""
    for copy, original in shared_copies(config).items():
        if copy in reader and not torch.equal(reader.read(copy), reader.read(original)):
            raise CheckpointError(
                f"{reader.path(copy)}: {copy} differs from {original}; K3's MTP layer shares it, so it cannot be loaded"
            )


def write_weights(
    folder: Path,
    config: ModelConfig,
    source: Source,
    storage: Storage,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write all tensors of `config` into `folder`: one file, or shards that never split a layer and their index."""
    parts: list[Unit] = list(units(config))
    sizes = [
        sum(entry.num_bytes for stored in unit.tensors for entry in storage.entries(stored, source)) for unit in parts
    ]
    groups = list(split_units(sizes, shard_bytes))
    weight_map: dict[str, str] = {}
    done, total = 0, sum(sizes)
    for number, group in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        owners = {
            entry: stored for i in group for stored in parts[i].tensors for entry in storage.entries(stored, source)
        }
        entries = file_order(owners)
        write_safetensors(folder / name, entries, _values(owners, source, storage))
        weight_map.update(dict.fromkeys(sorted(entry.name for entry in entries), name))
        done += sum(sizes[i] for i in group)
        if on_progress is not None:
            on_progress(done, total)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(to_json(index), encoding="utf-8")


def _values(owners: dict[Entry, StoredTensor], source: Source, storage: Storage) -> Callable[[Entry], torch.Tensor]:
    """The data of an entry; codes and scales of one weight come one after the other, so it is quantised once."""
    ready: dict[str, torch.Tensor] = {}

    def value(entry: Entry) -> torch.Tensor:
        if entry.name not in ready:
            stored = owners[entry]
            names = [announced.name for announced in storage.entries(stored, source)]
            ready.update(zip(names, storage.values(stored, source)))
        return ready.pop(entry.name)

    return value
