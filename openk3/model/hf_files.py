"""Read and write sharded safetensors one tensor at a time, and refuse what is damaged, naming the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from openk3.config.json_file import JsonError, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class CheckpointError(ValueError):
    """A checkpoint on disk is not what its configuration describes; the message names the file."""


@dataclass(frozen=True)
class Entry:
    """What the header of a safetensors file says about one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Length of its data."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class CheckpointReader:
    """The tensors of a checkpoint folder by name; at most one file is open at a time.

    Raises CheckpointError for a folder without safetensors, an index that points outside the folder, and files that
    are missing, truncated or not safetensors. Nothing but safetensors and JSON is ever read.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.index: dict[str, str] = self._read_index()  # tensor name -> file name
        self._stack = ExitStack()
        self._open_name = ""
        self._file: Any = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._open_name, self._file = "", None

    def __contains__(self, name: str) -> bool:
        return name in self.index

    def path(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        return self.directory / self.index[name]

    def entry(self, name: str) -> Entry:
        """Dtype and shape of a tensor, without reading its data."""
        path = self.path(name)
        try:
            part = self._open(name).get_slice(name)
            kind = part.get_dtype()
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error})") from None
        if kind not in _TORCH:
            raise CheckpointError(f"{path}: tensor {name} has dtype {kind}; expected one of {', '.join(_TORCH)}")
        return Entry(name, _TORCH[kind], tuple(part.get_shape()))

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` on the CPU, in its stored dtype."""
        try:
            return self._open(name).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path(name)}: tensor {name} cannot be read ({error})") from None

    def _open(self, name: str) -> Any:
        file_name = self.index[name]
        if file_name != self._open_name:
            self._stack.close()
            self._open_name = ""
            self._file = self._stack.enter_context(open_safetensors(self.directory / file_name))
            self._open_name = file_name
        return self._file

    def _read_index(self) -> dict[str, str]:
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: no such folder; expected a checkpoint folder")
        path = self.directory / INDEX
        if path.exists():
            return _read_weight_map(path)
        single = self.directory / SINGLE
        if not single.exists():
            raise CheckpointError(
                f"{self.directory}: holds neither {INDEX} nor {SINGLE}; only safetensors checkpoints are read"
            )
        with open_safetensors(single) as file:
            return dict.fromkeys(file.keys(), SINGLE)


def open_safetensors(path: Path) -> Any:
    """A safetensors handle; CheckpointError naming the file when it is missing, truncated or something else."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, though the checkpoint's index names it")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path}: damaged or incomplete safetensors file of {size:,} bytes ({error})") from None


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        data = read_json(path)
    except JsonError as error:
        raise CheckpointError(f"{path}: not a safetensors index ({error})") from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: not a safetensors index (no object weight_map in it)")
    items = list(weight_map.items())
    for name, file in items:
        plain = isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
        if not plain or "\\" in file:
            raise CheckpointError(f"{path}: {name} points to {file!r}; expected a .safetensors file in the same folder")
    return dict(items)


def write_safetensors(path: Path, entries: Iterable[Entry], tensor_of: Callable[[Entry], torch.Tensor]) -> None:
    """Write a safetensors file; each tensor is asked for when its turn comes, in the order of `entries`.

    Raises RuntimeError when a tensor is not what its entry announces.
    """
    entries = list(entries)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        span = [offset, offset + entry.num_bytes]
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            file.write(_data(entry, tensor_of(entry)))
        file.flush()
        os.fsync(file.fileno())


def _data(entry: Entry, tensor: torch.Tensor) -> memoryview:
    if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise RuntimeError(f"{tensor.dtype} {tuple(tensor.shape)} is not what was announced: {entry}")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries sorted so that every tensor's data is aligned: widest dtype first, then by name."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def split_units(sizes: list[int], limit: int) -> Iterator[list[int]]:
    """Group consecutive units into files of at most `limit` bytes; a unit larger than that has a file of its own."""
    group: list[int] = []
    used = 0
    for i, size in enumerate(sizes):
        if group and used + size > limit:
            yield group
            group, used = [], 0
        group.append(i)
        used += size
    if group:
        yield group
