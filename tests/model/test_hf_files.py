"""Checkpoint folders: shards and index, damaged and hostile files refused by name, whole folders or nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from openk3.config.model import ConfigError, ModelConfig
from openk3.model.accounting import account
from openk3.model.hf import convert_checkpoint, from_pretrained, save_pretrained
from openk3.model.hf_files import (
    CheckpointError,
    CheckpointReader,
    Entry,
    file_order,
    split_units,
    write_safetensors,
)
from openk3.model.k3 import K3
from openk3.runtime.staging import FolderError

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NORM = "language_model.model.norm.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"


@pytest.fixture(scope="module")
def model() -> K3:
    return K3.from_pretrained(GOLDEN / "mxfp4_a")


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """A checkpoint of one file that a test may damage."""
    model.save_pretrained(tmp_path / "m", experts="mxfp4")
    return tmp_path / "m"


@pytest.fixture
def shards(model, tmp_path) -> Path:
    """The same in several files with an index."""
    model.save_pretrained(tmp_path / "s", experts="mxfp4", shard_bytes=100_000)
    return tmp_path / "s"


def refused(folder: Path, message: str) -> None:
    """Loading fails with one line that names the folder or a file in it and matches `message`."""
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        K3.from_pretrained(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def edit(folder: Path, change) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")


def test_shards_never_split_a_layer(shards):
    """Released layout: an index, a layer wholly in one file, sizes within the limit unless a layer alone exceeds it."""
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in shards.glob("*.safetensors"))
    count = len(files)
    assert count >= 5 and files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    layer_files: dict[str, set[str]] = {}
    found: dict[str, str] = {}
    total = 0
    for name in files:
        with safe_open(shards / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            units = set()
            size = 0
            for key in list(file.keys()):
                found[key] = name
                tensor = file.get_tensor(key)
                size += tensor.nbytes
                layer = re.search(r"layers\.(\d+)\.", key)
                if layer:
                    layer_files.setdefault(layer[1], set()).add(name)
                units.add(layer[1] if layer else "rest")
            assert size <= 100_000 or len(units) == 1
            total += size
    assert index == {"metadata": {"total_size": total}, "weight_map": found}
    assert all(len(names) == 1 for names in layer_files.values()) and len(layer_files) == 5
    assert total == account(ModelConfig.from_json(shards)).weight_bytes("mxfp4", "bf16")


def test_shards_and_single_file_hold_the_same(shards, folder):
    whole = load_file(folder / "model.safetensors")
    parts: dict[str, torch.Tensor] = {}
    for path in shards.glob("*.safetensors"):
        parts.update(load_file(path))
    assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)
    first, second = K3.from_pretrained(shards).state_dict(), K3.from_pretrained(folder).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_split_keeps_order_and_limit(sizes, limit):
    groups = list(split_units(sizes, limit))
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    for group, after in zip(groups, groups[1:]):
        used = sum(sizes[i] for i in group)
        assert used + sizes[after[0]] > limit  # no file is closed early
    assert all(len(group) == 1 or sum(sizes[i] for i in group) <= limit for group in groups)


def test_writer_agrees_with_the_library(tmp_path):
    """Dtypes, shapes (empty ones too) and bytes as the safetensors library reads them, data aligned."""
    tensors = {
        "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
        "a": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        "u": torch.arange(5, dtype=torch.uint8),
        "none": torch.empty(0, 4, dtype=torch.float32),
    }
    entries = file_order(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    write_safetensors(tmp_path / "x.safetensors", entries, lambda entry: tensors[entry.name])
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    raw = (tmp_path / "x.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    for entry in entries:
        start = 8 + int.from_bytes(raw[:8], "little") + header[entry.name]["data_offsets"][0]
        assert start % entry.dtype.itemsize == 0
    with pytest.raises(RuntimeError, match="not what was announced"):
        write_safetensors(tmp_path / "y.safetensors", entries, lambda entry: torch.zeros(1))


def test_reader_names_what_it_holds():
    with CheckpointReader(GOLDEN / "text_b") as reader:
        entry = reader.entry("language_model.model.layers.0.self_attn.A_log")
        assert (entry.dtype, entry.shape, entry.num_bytes) == (torch.float32, (128,), 512)
        assert "language_model.model.layers.0.self_attn.a_log" not in reader


def test_missing_and_unexpected_tensors_are_listed(folder):
    edit(folder, lambda stored: [stored.pop(NORM), stored.update({"language_model.extra": torch.zeros(1)})])
    refused(folder, rf"1 tensors missing: {re.escape(NORM)}; 1 tensors unexpected: language_model\.extra")


def test_half_of_a_packed_pair_is_missing(folder):
    expert = "language_model.model.layers.2.block_sparse_moe.experts.5.w3.weight"
    edit(folder, lambda stored: stored.pop(f"{expert}_scale"))
    refused(folder, rf"1 tensors missing: {re.escape(expert)}_scale")


def test_unexpected_mtp_tensors_are_not_dropped(folder):
    edit(folder, lambda stored: stored.update({"language_model.model.layers.5.enorm.weight": torch.ones(64)}))
    refused(folder, r"unexpected: language_model\.model\.layers\.5\.enorm\.weight")


def test_shapes_and_dtypes_are_checked(folder):
    edit(folder, lambda stored: stored.update({NORM: torch.ones(63, dtype=torch.bfloat16)}))
    refused(folder, rf"model\.safetensors: tensor {re.escape(NORM)} has shape \[63\], .* \[64\]")
    edit(folder, lambda stored: stored.update({NORM: torch.ones(64, dtype=torch.uint8)}))
    refused(folder, "holds integers; expected floating-point values")
    expert = "language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight_packed"
    edit(folder, lambda stored: stored.update({NORM: torch.ones(64), expert: stored[expert].float()}))
    refused(folder, "weight_packed is torch.float32; packed MXFP4 is stored as uint8")


def test_padding_of_a_log(folder):
    """Heads alone and heads plus exact zeros are read; any other length, or a tail that is not zero, is refused."""
    padded = load_file(folder / "model.safetensors")[A_LOG]
    assert padded.shape == (128,) and not padded[2:].any() and padded[:2].all()
    state = K3.from_pretrained(folder).state_dict()
    edit(folder, lambda stored: stored.update({A_LOG: padded[:2].clone()}))
    assert torch.equal(K3.from_pretrained(folder).state_dict()["layers.0.mixer.A_log"], state["layers.0.mixer.A_log"])
    edit(folder, lambda stored: stored.update({A_LOG: padded[:64].clone()}))
    refused(folder, r"A_log has shape \[64\]")
    edit(folder, lambda stored: stored.update({A_LOG: padded + 0.5}))
    refused(folder, "A_log has non-zero entries after its 2 heads")


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_files_are_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, r"model\.safetensors: damaged or incomplete safetensors file of [\d,]+ bytes")


def test_garbage_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"\x80\x04\x95" + bytes(range(256)) * 20)
    refused(folder, r"model\.safetensors: damaged or incomplete")


def test_missing_shard(shards):
    path = sorted(shards.glob("*.safetensors"))[1]
    path.unlink()
    refused(shards, rf"{re.escape(path.name)}: no such file")


def test_index_that_lies_about_a_file(shards):
    """A tensor that is not in the file the index names."""
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    other = min(index["weight_map"].values())
    index["weight_map"][NORM] = other
    path.write_text(json.dumps(index))
    refused(shards, rf"{re.escape(other)}: tensor {re.escape(NORM)} cannot be read")


@pytest.mark.parametrize(
    "target", ["../m.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", 3, "a\\b.safetensors"]
)
def test_index_cannot_point_outside(shards, target):
    """Path traversal: only plain .safetensors names in the same folder."""
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = target
    path.write_text(json.dumps(index))
    refused(shards, "index.json: .* expected a .safetensors file in the same folder")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 1}', "\xff", "[" * 100_000])
def test_broken_index(shards, text):
    (shards / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    refused(shards, r"index\.json: not a safetensors index")


def test_pickles_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "only safetensors checkpoints are read")


def test_folder_errors(folder, tmp_path):
    refused(tmp_path / "absent", "no such folder")
    (folder / "config.json").unlink()
    refused(folder, r"config\.json: no such file")


@pytest.mark.parametrize("version", [2, 0, "1", True, None])
def test_unknown_format_version(folder, version):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"format_version": version}))
    refused(folder, rf"config\.json: format_version {version!r} is unknown")


def test_nothing_is_left_when_writing_fails(model, tmp_path):
    """Whatever stops the writing, the old state stays and no temporary folder remains."""

    def fail(path: Path) -> None:
        assert (path / "config.json").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "m", also=fail)
    assert list(tmp_path.iterdir()) == []
    model.save_pretrained(tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "m", experts="mxfp4", also=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before


def test_conversion_that_fails_midway_leaves_nothing(shards, tmp_path):
    """The failure comes after most of the target was written."""

    def stop(done: int, total: int) -> None:
        assert any(tmp_path.glob(".target.new-*/*.safetensors"))
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(shards, tmp_path / "target", experts="bf16", shard_bytes=100_000, on_progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 4096}, "does not match its config.json; [0-9]+ tensors missing"),
        ({"vocab_size": 2**40}, r"tensor .*embed_tokens.* has shape \[128, 64\], but config.json asks for"),
        ({"intermediate_size": 2**40}, r"has shape \[.*\], but config.json asks for"),
    ],
)
def test_a_config_that_asks_for_more_than_the_files_hold_costs_nothing(folder, tmp_path, changes, words):
    """Headers are compared before anything is allocated or written."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))

    def empty(*args: object, **options: object) -> None:
        raise AssertionError("allocated")

    with pytest.raises(CheckpointError, match=words):
        from_pretrained(empty, folder, dtype=torch.float32, device="cpu")
    with pytest.raises(CheckpointError, match=words):
        convert_checkpoint(folder, tmp_path / "target", on_progress=empty)
    assert not (tmp_path / "target").exists()


def test_dtypes_that_the_release_does_not_have_are_refused(folder):
    """Eight-bit floats would lose their scales without a word."""
    edit(folder, lambda stored: stored.update({NORM: torch.ones(64).to(torch.float8_e4m3fn)}))
    refused(folder, "has dtype F8_E4M3; expected one of F64, F32")


def test_foreign_folders_are_left_alone(model, tmp_path):
    """A folder with other files, a released checkpoint or a plain file is never replaced."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/todo.txt").write_text("milk")
    shutil.copytree(GOLDEN / "text_a", tmp_path / "released")
    (tmp_path / "file").write_text("x")
    for name, message in (("notes", "holds other files"), ("released", "holds other files"), ("file", "is a file")):
        with pytest.raises(FolderError, match=f"{name}: {message}"):
            model.save_pretrained(tmp_path / name)
    assert (tmp_path / "notes/todo.txt").read_text() == "milk" and (tmp_path / "file").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "notes", "released"]


def test_own_checkpoint_is_replaced_and_its_tokenizer_kept(model, tmp_path):
    """Empty and missing folders are filled; an earlier checkpoint of ours makes way, its other files stay."""
    target = tmp_path / "deep/er/m"
    model.save_pretrained(target, experts="mxfp4", shard_bytes=100_000)
    (target / "tiktoken.model").write_text("aGk= 0\n")
    (target / "notes").mkdir()
    (target / "notes/a.txt").write_text("a")
    save_pretrained(model, target, experts="bf16", card="Trained on nothing much.", also=lambda path: None)
    names = sorted(path.name for path in target.iterdir())
    assert names == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes",
        "tiktoken.model",
    ]
    assert (target / "notes/a.txt").read_text() == "a"
    card = (target / "README.md").read_text()
    assert "\nTrained on nothing much.\n" in card and f"{account(model.config).total:,}" in card
    (tmp_path / "empty").mkdir()
    usual = (tmp_path / "empty").stat().st_mode
    model.save_pretrained(tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_mode == usual
