"""Checkpoints of a training state: torch DCP tensors and one JSON file, whole or not there at all, newest few kept."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from openk3.config.json_file import JsonError, read_file, read_json
from openk3.config.model import ModelConfig
from openk3.data.documents import DataError
from openk3.model.k3 import K3
from openk3.train.state import TrainState

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the folder and says what to do."""


def save(state: TrainState, folder: Path, *, keep: int = 2) -> Path:
    """Write `folder`/step-N and remove all but the newest `keep`; returns its path.

    Everything is written under a temporary name, flushed to disk and then renamed: a crash, a kill or a full disk
    leaves the earlier checkpoints as they were and nothing that looks like a new one. Raises CheckpointError.
    """
    final = folder / f"step-{state.step:08d}"
    for leftover in folder.glob(".step-*"):  # of a process that was killed; a run has one writer
        shutil.rmtree(leftover, ignore_errors=True)
    if final.is_dir():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=folder))
    try:
        _write(state, staging)
        os.replace(staging, final)
        _flush(folder)
    except (OSError, CheckpointException) as error:
        _raise_if_stopped(error)
        raise CheckpointError(
            f"{final}: cannot be written ({reason(error)}); earlier checkpoints are untouched, make room and resume"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for old in list_checkpoints(folder)[:-keep]:
        # Renamed first: a half-removed folder must not be taken for a checkpoint.
        doomed = old.with_name(f".{old.name}.old")
        os.replace(old, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def load(state: TrainState, path: Path) -> None:
    """Put a saved state into `state`, which was built from the same configuration; training goes on bit for bit.

    Nothing in the files is ever executed. Raises CheckpointError if they are damaged or of another model, and DataError
    if the training documents changed.
    """
    extra = _extra(path, state.config.model)
    balance = state.balance.state_dict()
    _fill({**_tensors(state), "balance": balance}, path)
    state.optimizer.publish(state.optimizer.masters)
    state.balance.load_state_dict(balance)
    try:
        _restore(state, extra)
    except DataError:
        raise
    except Exception as error:  # whatever a damaged or hostile record can cause
        raise _damaged(path, error) from error


def load_weights(model: K3, path: Path) -> None:
    """Put only the weights of a saved state into `model`, in place. Raises CheckpointError as `load` does."""
    _extra(path, model.config)
    _fill({"model": _weights(model)}, path)


def _extra(path: Path, config: ModelConfig) -> dict[str, Any]:
    """What a checkpoint holds beside tensors, once it is known to be of this model."""
    try:
        extra = read_json(path / "state.json")
    except (OSError, JsonError) as error:
        raise _damaged(path, error) from None
    if not isinstance(extra, dict):
        raise _damaged(path, ValueError("state.json holds no object"))
    if extra.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {extra.get('format')!r}; this version reads format {FORMAT}")
    if extra.get("model") != _shapes(config):
        raise CheckpointError(
            f"{path}: holds another model than this configuration describes; resume with its own run.json"
        )
    return extra


def _restore(state: TrainState, extra: dict[str, Any]) -> None:
    """Everything that is no tensor. Raises ValueError and the like for a record that no checkpoint has."""
    for name, least in (("step", 0), ("total_steps", 1), ("tokens", 0)):
        if type(extra[name]) is not int or extra[name] < least:
            raise ValueError(f"{name} is {extra[name]!r}")
    if not (isinstance(extra["seconds"], float | int) and 0 <= extra["seconds"] < math.inf):
        raise ValueError(f"seconds is {extra['seconds']!r}")
    if state.loader is not None and extra["loader"] is not None:
        state.loader.load_state_dict(extra["loader"])
    for name in ("step", "total_steps", "tokens", "seconds"):
        setattr(state, name, extra[name])
    _set_generators(extra["generators"])


def _fill(tensors: dict[str, Any], path: Path) -> None:
    """Read the named tensors of a checkpoint into the given ones."""
    reader = _Reader(path)
    try:
        stored = reader.read_metadata().state_dict_metadata  # torch 2.11's DCP would hide why the index was refused
        _require_same(_flat(tensors), stored, path)
        with _quiet():
            dcp.load(tensors, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # whatever damaged or hostile files can cause
        _raise_if_stopped(error)
        raise _damaged(path, error) from error


def _flat(tensors: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors by the names that DCP gives them."""
    out: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def _require_same(wanted: dict[str, torch.Tensor], stored: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError unless the checkpoint holds every wanted tensor in its shape."""
    for name, tensor in wanted.items():
        shape = getattr(stored.get(name), "size", None)
        if shape is None and name in stored:
            raise pickle.UnpicklingError(f"{name} is not a tensor")
        if shape != tensor.shape:
            found = "does not have" if shape is None else f"has in shape {list(shape)}"
            raise CheckpointError(
                f"{path}: was saved under another configuration: {name}, here {list(tensor.shape)}, it {found};"
                " resume with the number format and balancing it was saved with"
            )


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{path}: damaged ({reason(error)}); remove it to resume from an earlier one")


def _write(state: TrainState, staging: Path) -> None:
    extra = {
        "format": FORMAT,
        "step": state.step,
        "total_steps": state.total_steps,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "loader": None if state.loader is None else state.loader.state_dict(),
        "generators": _generators(),
        "model": _shapes(state.config.model),
    }
    with _quiet():
        dcp.save({**_tensors(state), "balance": state.balance.state_dict()}, checkpoint_id=staging, no_dist=True)
    (staging / "state.json").write_text(json.dumps(extra) + "\n", encoding="utf-8")
    for file in staging.iterdir():
        _flush(file)
    _flush(staging)
    staging.chmod(0o755)


def _tensors(state: TrainState) -> dict[str, Any]:
    """The tensors themselves: saving reads them, loading writes into them."""
    return {"model": _weights(state.model), "optimizer": state.optimizer.state_dict()}


def _weights(model: K3) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _shapes(config: ModelConfig) -> dict[str, Any]:
    """A model's configuration as JSON reads it back."""
    return json.loads(config.to_json())


def _generators() -> dict[str, Any]:
    """States of every random generator that training could draw from."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": [bytes(generator.tolist()).hex() for generator in cuda],
    }


def _set_generators(saved: dict[str, Any]) -> None:
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state(("MT19937", np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(saved["torch"])), dtype=torch.uint8))
    if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(
            [torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8) for text in saved["cuda"]]
        )


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's index is a pickle: admit the plain records that it is made of and nothing that could run code."""

    _RECORDS = {
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        """The named record type. Raises UnpicklingError for any other name."""
        allowed = (
            (module_name == "torch.distributed.checkpoint.metadata" and global_name in self._RECORDS)
            or (module_name, global_name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            or (module_name, global_name) == ("torch.serialization", "_get_layout")
            or (module_name == "pathlib" and global_name in ("Path", "PosixPath", "WindowsPath"))
            or (module_name == "torch" and global_name == "Size")
            or (module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype))
        )
        if not allowed:
            raise pickle.UnpicklingError(f"its index names {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


class _Reader(dcp.FileSystemReader):
    """Reads DCP files without trusting them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the stored tensors."""
        metadata = _MetadataUnpickler(io.BytesIO(read_file(Path(self.path) / ".metadata"))).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"its index is a {type(metadata).__name__}")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"its index names {info.relative_path!r}, outside the folder")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """Tensors only: DCP would unpickle other values without restriction."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Raises UnpicklingError."""
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is not a tensor")


@contextmanager
def _quiet() -> Generator[None]:
    """Without DCP's warning that a single process is meant, which it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield


def _flush(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cause(error: BaseException) -> BaseException:
    """What happened, from inside DCP's wrapping."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _raise_if_stopped(error: BaseException) -> None:
    """Ctrl-C and SIGTERM are no fault of a file, though DCP wraps them like one."""
    if not isinstance(_cause(error), Exception | CheckpointException):
        raise _cause(error)


def reason(error: BaseException | None) -> str:
    """The cause in one line."""
    error = _cause(error) if error is not None else error
    if isinstance(error, OSError) and error.filename is not None:
        return f"{Path(os.fsdecode(error.filename)).name}: {error.strerror}"
    if isinstance(error, JsonError):
        return str(error).rpartition("state.json: ")[2]
    text = " ".join((error.strerror or str(error) if isinstance(error, OSError) else str(error)).split())
    if "inline_container" in text:  # torch's archive writer and reader say only where in their source they stopped
        return "a file ends too early; the disk may be full"
    return text[:200] or type(error).__name__
