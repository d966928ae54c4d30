"""Bad input at every door: each record or file is dropped with a counted reason, or named in one line."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openk3.config.prepare import PrepareConfig
from openk3.data.documents import DataError
from openk3.data.prepare import readers, streams
from openk3.data.prepare.inputs import kind_of, list_inputs
from openk3.data.prepare.items import FAULTS, Fault, Item, Place
from openk3.data.prepare.readers import Reader

LINES = [{"text": f"record number {number}"} for number in range(300)]
JSONL = "".join(json.dumps(line) + "\n" for line in LINES).encode()


def read(*paths: Path, start: Place = readers.START, **settings: int) -> list[tuple[Item | Fault, Place]]:
    """Everything that a reader gives, after the faults of the listing."""
    config = PrepareConfig(inputs=tuple(map(str, paths)), out="", **settings)
    entries, faults = list_inputs(config.inputs)
    return [*((fault, readers.START) for fault in faults), *Reader(entries, config).read(start)]


def items(found: list[tuple[Item | Fault, Place]]) -> list[Item]:
    """The records alone."""
    return [item for item, _ in found if isinstance(item, Item)]


def faults(found: list[tuple[Item | Fault, Place]]) -> list[tuple[str, str, bool]]:
    """(file's name and place, reason, whole) of the faults, each with a reason that the report explains."""
    some = [item for item, _ in found if isinstance(item, Fault)]
    assert {fault.reason for fault in some} <= set(FAULTS)
    return [(os.path.basename(fault.where), fault.reason, fault.whole) for fault in some]


def zstd(data: bytes) -> bytes:
    """Compressed, in two frames, as tools that work in parallel write it."""
    half = len(data) // 2
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]))


def packed(folder: Path, name: str, data: bytes) -> Path:
    """A file of the data, compressed as its name says."""
    path = folder / name
    path.write_bytes({".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)(data))
    return path


def parquet(path: Path, values: list[bytes | None], group: int = 100) -> Path:
    """One column of bytes, in row groups."""
    pq.write_table(pa.table({"text": pa.array(values, pa.binary())}), path, row_group_size=group)
    return path


def tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    """An archive with these files."""
    with tarfile.open(path, mode) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.zip", "a.tar", "a.tar.gz"])
def test_reading_goes_on_from_any_place(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that is given out continues with exactly what comes behind it."""
    monkeypatch.setattr(streams, "BLOCK", 1000)
    if name == "a.parquet":
        path = parquet(tmp_path / name, [line["text"].encode() for line in LINES[:150]])
    elif name == "a.zip":
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("one.jsonl", JSONL[:1000].rpartition(b"\n")[0])
            archive.writestr("two.txt", "some text")
            archive.writestr("three.jsonl", JSONL[: JSONL.find(b"\n", 800)])
    elif ".tar" in name:
        members = [("one.jsonl", JSONL[: JSONL.find(b"\n", 900)]), ("two.txt", b"text"), ("b.jsonl", JSONL[:310])]
        path = tar(tmp_path / name, members, "w:gz" if name.endswith("gz") else "w")
    else:
        path = packed(tmp_path, name, JSONL)
    whole = read(path)
    assert len(items(whole)) == len(whole) > 20
    assert len({item.where for item in items(whole)}) == len(whole)
    for number in (*range(0, len(whole), 13), len(whole) - 1):
        assert read(path, start=whole[number][1]) == whole[number + 1 :]


def test_records_name_their_file_and_line(tmp_path: Path) -> None:
    """Blank lines count as lines, but not as records; a last line needs no end."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\r\n\n  \n{"text": "two"}')
    assert [(item.where, item.payload) for item in items(read(path))] == [
        (f"{path}:1", b'{"text": "one"}\r'),
        (f"{path}:4", b'{"text": "two"}'),
    ]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_streams_give_what_came_before(tmp_path: Path, suffix: str) -> None:
    """And the record in which they end counts as cut off."""
    path = packed(tmp_path, f"a.jsonl{suffix}", JSONL)
    whole = items(read(path))
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    found = read(path)
    got = items(found)
    assert got == whole[: len(got)] and len(got) < len(whole)
    rest = faults(found)
    assert rest[-1] == (f"a.jsonl{suffix}", "truncated", True)
    assert len(got) + sum(not is_whole for _, _, is_whole in rest) in (len(got), len(got) + 1)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.zip", "a.tar.gz", "a.tar", "a.tar.zst"])
def test_what_is_not_its_format_is_damaged(tmp_path: Path, name: str) -> None:
    """Named once, and the next file is read."""
    (tmp_path / name).write_bytes(b"this is no archive at all " * 50)
    (tmp_path / "b.txt").write_text("text")
    found = read(tmp_path)
    assert faults(found) == [(name, "damaged", True)]
    assert [item.payload for item in items(found)] == [b"text"]


def test_damage_inside_a_stream(tmp_path: Path) -> None:
    """A wrong check sum at the end of a gzip file: all records are there, the file is named."""
    path = packed(tmp_path, "a.jsonl.gz", JSONL)
    data = bytearray(path.read_bytes())
    data[-6] ^= 0xFF
    path.write_bytes(data)
    found = read(path)
    assert len(items(found)) == 300
    assert faults(found)[-1][1:] == ("damaged", True)


def test_truncated_parquet(tmp_path: Path) -> None:
    """Its index is at the end: nothing of it can be read."""
    path = parquet(tmp_path / "a.parquet", [b"x"] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    assert faults(read(path)) == [("a.parquet", "damaged", True)]


def test_parquet_with_a_broken_page_keeps_the_groups_before(tmp_path: Path) -> None:
    """Rows of whole groups come, then the file is named."""
    values = [os.urandom(1000) for _ in range(300)]
    path = parquet(tmp_path / "a.parquet", values)
    place = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[place : place + 40] = b"\xff" * 40
    path.write_bytes(data)
    found = read(path)
    assert [item.payload for item in items(found)] == values[:100]
    assert faults(found) == [("a.parquet", "damaged", True)]


def test_parquet_values_come_as_bytes(tmp_path: Path) -> None:
    """Whatever they hold; a column of another name or kind is no text."""
    path = parquet(tmp_path / "a.parquet", [b"\xff\xfe", None, b"text"])
    assert [(item.payload, item.where) for item in items(read(path))] == [
        (b"\xff\xfe", f"{path}:1"),
        (b"", f"{path}:2"),
        (b"text", f"{path}:3"),
    ]
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": pa.array(["x", "x"]).dictionary_encode()}), tmp_path / "d.parquet")
    assert faults(read(tmp_path / "b.parquet")) == [("b.parquet", "no_text_column", True)]
    assert faults(read(tmp_path / "c.parquet")) == [("c.parquet", "no_text_column", True)]
    assert len(items(read(tmp_path / "d.parquet"))) == 2


def test_one_long_line_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over by blocks, whatever its size; records around it stay, with their numbers."""
    monkeypatch.setattr(streams, "BLOCK", 1 << 16)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + b"x" * (3 << 20) + b'\n{"text": "two"}\n' + b"y" * (2 << 20))
    found = read(path, max_document_mib=1)
    assert [item.where for item in items(found)] == [f"{path}:1", f"{path}:3"]
    assert faults(found) == [("a.jsonl:2", "too_long", False), ("a.jsonl:4", "too_long", False)]
    lines = streams.bounded_lines(path.open("rb"), 100)
    assert [line and len(line) for line, _, _ in lines] == [15, None, 15, None]


def test_long_texts_and_rows(tmp_path: Path) -> None:
    """As for lines."""
    (tmp_path / "a.txt").write_bytes(b"x" * ((1 << 20) + 1))
    (tmp_path / "b.txt").write_bytes(b"x" * (1 << 20))
    parquet(tmp_path / "c.parquet", [b"x" * ((1 << 20) + 1), b"x"])
    found = read(tmp_path, max_document_mib=1)
    assert faults(found) == [("a.txt", "too_long", False), ("c.parquet:1", "too_long", False)]
    assert [len(item.payload) for item in items(found)] == [1 << 20, 1]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.tar.gz"])
def test_bombs_are_not_unpacked(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What grows too much is left where that is seen, and named."""
    monkeypatch.setattr(streams, "BOMB_FLOOR", 1 << 20)
    data = b"\0" * (24 << 20)
    if name == "a.tar.gz":
        tar(tmp_path / name, [("big.jsonl", data), ("b.txt", b"text")], "w:gz")
    else:
        packed(tmp_path, name, data)
    found = read(tmp_path / name, max_document_mib=64, max_ratio=50)
    assert items(found) == []
    assert faults(found)[-1] == (name, "bomb", True)


def test_zip_bombs_are_seen_before_they_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sizes that the archive declares, members together."""
    monkeypatch.setattr("openk3.data.prepare.archives.BOMB_FLOOR", 1 << 20)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", "text")
        archive.writestr("big.txt", b"\0" * (8 << 20))
    found = read(tmp_path / "a.zip", max_ratio=50)
    assert [item.payload for item in items(found)] == [b"text"]
    assert faults(found) == [("a.zip", "bomb", True)]


HOSTILE = ["../up.txt", "/etc/absolute.txt", "a/../../b.txt", "C:\\windows.txt", "..\\up.txt"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_names_in_archives_lead_nowhere(tmp_path: Path, kind: str) -> None:
    """They are refused by name, and nothing is ever written."""
    good = ("good.txt", b"text")
    if kind == "tar":
        tar(tmp_path / "a.tar", [*((name, b"x") for name in HOSTILE), good])
    else:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            for name, data in (*((name, b"x") for name in HOSTILE), good):
                archive.writestr(name, data)
    found = read(tmp_path / f"a.{kind}")
    assert [item.where for item in items(found)] == [f"{tmp_path}/a.{kind}!good.txt"]
    assert [reason for _, reason, _ in faults(found)] == ["unsafe_path"] * len(HOSTILE)
    assert [path.name for path in tmp_path.iterdir()] == [f"a.{kind}"]


def test_members_that_are_no_plain_text(tmp_path: Path) -> None:
    """Links, devices, archives in archives, unknown kinds, hidden and empty ones."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in (("link.txt", tarfile.SYMTYPE), ("hard.txt", tarfile.LNKTYPE), ("dev.txt", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in ("inner.zip", "a.jsonl.gz", "p.parquet", "image.png", ".hidden.txt", "empty.txt", "empty.jsonl"):
            archive.addfile(tarfile.TarInfo(name))
        archive.addfile(tarfile.TarInfo(os.fsdecode(b"bad\xff\n.jsonl")))
    names = ["not_a_file"] * 3 + ["nested_archive"] * 3 + ["unknown_kind", "hidden", *["empty_file"] * 3]
    found = faults(read(path))
    assert [reason for _, reason, _ in found] == names and found[-1][0] == "a.tar!bad\ufffd .jsonl"


def test_locked_and_broken_members_of_zips(tmp_path: Path) -> None:
    """A member that cannot be read is named; those after it come."""
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a.txt", "locked.txt", "broken.txt", "z.txt"):
            archive.writestr(name, f"this is {name}")
    data = path.read_bytes()
    data = data.replace(b"this is broken", b"this is BROKEN")  # its check sum no longer fits
    central = data.index(b"PK\x01\x02")
    entry = data.index(b"locked.txt", central) - 46
    data = data[: entry + 8] + b"\x01" + data[entry + 9 :]
    path.write_bytes(data)
    found = read(path)
    assert [item.payload for item in items(found)] == [b"this is a.txt", b"this is z.txt"]
    assert [reason for _, reason, _ in faults(found)] == ["encrypted", "damaged"]


def test_truncated_tar_gives_what_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole members and lines up to the last block, then the fault."""
    monkeypatch.setattr("openk3.data.prepare.archives.MEMBER_BLOCK", 256)
    path = tar(tmp_path / "a.tar", [("a.txt", b"text"), ("b.jsonl", JSONL * 10)])
    path.write_bytes(path.read_bytes()[:60_000])
    found = read(path)
    assert items(found)[0].payload == b"text" and len(items(found)) > 10
    assert faults(found)[-1] == ("a.tar", "truncated", True)
    assert [reason for _, reason, is_whole in faults(found) if not is_whole] == ["cut_off"]


def test_folders_with_everything_in_them(tmp_path: Path) -> None:
    """Loops of links, dead links, pipes, other names of one file, empty and hidden files: each is counted once."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "dead.txt").symlink_to("nowhere")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "circle").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "picture.png").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / os.fsdecode(b"bad\xff.txt")).write_text("named badly")
    (tmp_path / "sub").mkdir()
    os.link(tmp_path / "a.txt", tmp_path / "sub" / "hard.txt")
    found = read(tmp_path)
    assert [item.payload for item in items(found)] == [b"text", b"named badly"]
    assert sorted(faults(found)) == [
        (".git", "hidden", True),
        ("b.txt", "same_file", True),
        ("circle", "linked_folder", True),
        ("dead.txt", "not_a_file", True),
        ("empty.jsonl", "empty_file", True),
        ("hard.txt", "same_file", True),
        ("loop.txt", "not_a_file", True),
        ("picture.png", "unknown_kind", True),
        ("pipe.txt", "not_a_file", True),
    ]


def test_inputs_that_are_named_must_be_of_use(tmp_path: Path) -> None:
    """One line each; a label may stand before a path."""
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "a.txt").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"nowhere: no such file or folder"):
        list_inputs([str(tmp_path / "nowhere")])
    with pytest.raises(DataError, match=r"a\.png: not a kind that is read"):
        list_inputs([str(tmp_path / "a.png")])
    with pytest.raises(DataError, match=r"a\.txt: empty file"):
        list_inputs([str(tmp_path / "a.txt")])
    with pytest.raises(DataError, match=r"empty: the folder is empty"):
        list_inputs([str(tmp_path / "empty")])
    (tmp_path / "a.txt").write_text("text")
    (entry,), _ = list_inputs([f"mathematics={tmp_path / 'a.txt'}"])
    assert entry.domain == "mathematics"


def test_empty_streams(tmp_path: Path) -> None:
    """A compressed file with nothing in it."""
    packed(tmp_path, "a.jsonl.gz", b"")
    packed(tmp_path, "b.jsonl.zst", b"")
    tar(tmp_path / "c.tar", [])
    assert faults(read(tmp_path)) == [
        ("a.jsonl.gz", "empty_file", True),
        ("b.jsonl.zst", "empty_file", True),
        ("c.tar", "empty_file", True),
    ]


def test_kinds_by_name() -> None:
    """Suffixes in any case, compressed or not."""
    assert kind_of("A.JSONL.GZ") == ("records", "gzip", "")
    assert kind_of("a.py.zst") == ("text", "zstd", ".py")
    assert kind_of("a.tgz") == ("tar", "gzip", "")
    assert kind_of("a.tar.zst") == ("tar", "zstd", "")
    assert kind_of("a.zip.gz") is None and kind_of("gz") is None and kind_of("a.exe") is None


def test_progress_is_of_bytes_and_ends_at_the_total(tmp_path: Path) -> None:
    """It never goes back, in files of every form."""
    packed(tmp_path, "a.jsonl.gz", JSONL)
    parquet(tmp_path / "b.parquet", [b"x"] * 300)
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        for number in range(5):
            archive.writestr(f"{number}.txt", "text")
    tar(tmp_path / "d.tar", [("a.jsonl", JSONL)])
    config = PrepareConfig(inputs=(str(tmp_path),), out="")
    reader = Reader(list_inputs(config.inputs)[0], config)
    seen = [reader.consumed for _ in reader.read()]
    assert seen == sorted(seen) and len(set(seen)) > 8
    assert reader.consumed == reader.total == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.zip", "a.tar", "a.tar.gz"])
def test_damage_anywhere_is_a_fault_or_a_record(tmp_path: Path, name: str) -> None:
    """Bytes changed, cut out or put in at random: nothing is raised, and every fault has a known reason."""
    if name == "a.parquet":
        path = parquet(tmp_path / name, [line["text"].encode() for line in LINES], 50)
    elif name == "a.zip":
        path = tmp_path / name
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("one.jsonl", JSONL)
            archive.writestr("two.txt", "some text" * 50)
    elif ".tar" in name:
        members = [("one.jsonl", JSONL[:3000]), ("two.txt", b"text" * 50)]
        path = tar(tmp_path / name, members, "w:gz" if name.endswith("gz") else "w")
    else:
        path = packed(tmp_path, name, JSONL)
    whole, rng = path.read_bytes(), random.Random(name)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(data) - 8)
            data[start : start + rng.randint(0, 8)] = rng.randbytes(rng.randint(0, 8))
        path.write_bytes(data)
        found = read(path)
        assert found
        faults(found)


def test_a_tar_file_ends_with_its_mark_alone(tmp_path: Path) -> None:
    """A header that is broken or cut off, and an archive behind the first one, are faults and no silent end."""
    data = tar(tmp_path / "a.tar", [("a.txt", b"first"), ("b.txt", b"second")]).read_bytes()
    second = next(at for at in range(512, len(data), 512) if data[at : at + 5] == b"b.txt")
    broken = bytearray(data)
    broken[second + 10] = 99
    for name, bad, reason in (
        ("header.tar", bytes(broken), "damaged"),
        ("between.tar", data[:second], "truncated"),
        ("within.tar", data[: second + 100], "truncated"),
    ):
        found = read(packed(tmp_path, name, bad))
        assert [item.payload for item in items(found)] == [b"first"], name
        assert faults(found) == [(name, reason, True)]
    found = read(packed(tmp_path, "two.tar", data + data))
    assert len(items(found)) == 2
    assert faults(found) == [("two.tar", "damaged", True)]


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_headers_of_tar_files_are_bounded(tmp_path: Path, kind: bytes) -> None:
    """A header that declares 4 GiB of attributes is damage before any of them is read."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 4 << 30
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf())
    os.truncate(path, 5 << 30)  # a hole
    assert faults(read(path)) == [("a.tar", "damaged", True)]
    path.unlink()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_long_names_of_members_are_cut(tmp_path: Path, kind: str) -> None:
    """Each record names its member: a name of 60,000 characters would be held as often."""
    name, data = "x" * 60_000 + ".jsonl", b'{"text": "a"}\n' * 3
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, data)
    else:
        tar(path, [(name, data)])
    found = items(read(path))
    assert len(found) == 3
    assert all(len(item.where) < 500 + len(str(path)) for item in found)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_broken_members_of_every_method_are_counted(tmp_path: Path, method: int) -> None:
    """Each byte of a member's data flipped: a record or a fault, and the next member is read."""
    path, bad = tmp_path / "a.zip", tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.txt", random.Random(0).randbytes(40).hex())
        archive.writestr("b.txt", "second")
    data = path.read_bytes()
    for place in range(35, 75):
        bad.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        found = read(bad)
        assert len(found) == 2, place
        assert items(found)[-1].payload == b"second"


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_lie_about_their_size_take_no_memory(tmp_path: Path, method: int) -> None:
    """A member that says 10 bytes and unpacks to 256 MiB is unpacked in small steps."""
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", method) as archive, archive.open("a.txt", "w") as file:
        for _ in range(256):
            file.write(bytes(1 << 20))
    data = bytearray(path.read_bytes())
    central = data.rindex(b"PK\x01\x02")
    data[central + 24 : central + 28] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    script = (
        "import resource, sys\nfrom openk3.config.prepare import PrepareConfig\n"
        "from openk3.data.prepare.inputs import list_inputs\nfrom openk3.data.prepare.readers import Reader\n"
        "config = PrepareConfig(inputs=(sys.argv[1],), out='')\nentries, _ = list_inputs(config.inputs)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "[found] = Reader(entries, config).read()\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n"
    )
    grown = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 150


def test_parquet_columns_of_one_name_and_values_that_repeat(tmp_path: Path) -> None:
    """Two columns of the name are none; a long value that a dictionary repeats without end is a bomb."""
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "two.parquet")
    assert faults(read(tmp_path / "two.parquet")) == [("two.parquet", "no_text_column", True)]
    indices = pa.array([0] * 20_000, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 10_000]))
    pq.write_table(pa.table({"text": column}), tmp_path / "bomb.parquet")
    found = read(tmp_path / "bomb.parquet")
    assert faults(found) == [("bomb.parquet", "bomb", True)]
    assert len(items(found)) == streams.BOMB_FLOOR // 10_000


def test_names_that_lead_to_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty name is not the current folder, and a user who does not exist has none."""
    monkeypatch.chdir(tmp_path)
    packed(tmp_path, "a.jsonl", JSONL)
    for given in ("", "code="):
        with pytest.raises(DataError, match="names no path"):
            list_inputs([given])
    with pytest.raises(DataError, match="no such file"):
        list_inputs(["~nobody-of-that-name/x"])


def test_folders_deeper_than_python_can_call(tmp_path: Path) -> None:
    """A file under more folders than calls may be nested is found."""
    (tmp_path / "in").mkdir()
    handle = os.open(tmp_path / "in", os.O_RDONLY)
    for _ in range(400):
        os.mkdir("a", dir_fd=handle)
        below = os.open("a", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(os.open("x.txt", os.O_CREAT | os.O_WRONLY, dir_fd=handle))
    os.close(handle)
    usual, frame, depth = sys.getrecursionlimit(), sys._getframe(), 0
    while (frame := frame.f_back) is not None:
        depth += 1
    sys.setrecursionlimit(depth + 200)
    try:
        _, found = list_inputs([str(tmp_path / "in")])
    finally:
        sys.setrecursionlimit(usual)
    assert [(os.path.basename(fault.where), fault.reason) for fault in found] == [("x.txt", "empty_file")]
