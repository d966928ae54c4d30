"""The whole pipeline: every record is accounted for, and a run that is stopped anywhere ends as if it had not been."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import shutil
import signal
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openk3.config.model import ConfigError
from openk3.config.prepare import DOMAINS, PrepareConfig
from openk3.data.documents import DataError
from openk3.data.prepare import journal, prepare, workers
from openk3.data.prepare.report import EXPLAINED, as_page, as_text
from openk3.data.shard import Shard, open_source
from openk3.data.text_shard import TextShard
from openk3.inputs.tokenizer import Tokenizer

SYLLABLES = [a + b for a in ("b", "d", "f", "l", "m", "n", "p", "r", "st", "t") for b in ("a", "en", "i", "or", "un")]
JOINTS = (
    "of the",
    "and the",
    "is in",
    "was near",
    "keeps a",
    "with",
    "has seen the",
    "that",
    "over",
    "to the",
    "for a",
)


def word(rng: random.Random) -> str:
    """A made-up one."""
    return "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3)))


def prose(seed: int, sentences: int = 9) -> str:
    """English-like text that no rule drops."""
    rng = random.Random(seed)
    made = []
    for _ in range(sentences):
        words = " ".join(f"{word(rng)} {rng.choice(JOINTS)}" for _ in range(6))
        made.append(f"The {words} {word(rng)}.")
    return " ".join(made)


def code(seed: int) -> str:
    """A small module."""
    rng = random.Random(seed)
    names = [f"{word(rng)}_{word(rng)}_{rng.randint(1, 99)}" for _ in range(8)]
    return "import os\n\n\n" + "\n\n".join(
        f'def {name}(path, count={rng.randint(1, 9)}):\n    """Walk it."""\n    return os.path.join(path, str(count))'
        for name in names
    )


# b.jsonl.gz repeats ten of a.jsonl, the archives one, one module and all of a.jsonl.
EXACT = 10 + 1 + 1 + 40


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder of every kind, with good and bad records, and duplicates across files."""
    folder = tmp_path / "in"
    folder.mkdir()
    records = [{"text": prose(n)} for n in range(40)]
    bad = ['{"text": 1}', "[]", "{broken", '{"text": "short"}', '{"text": "\\ud800 half"}', '{"other": "x"}', "", '"x"']
    lines = [json.dumps(record) for record in records] + bad
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress("\n".join(json.dumps({"text": prose(n)}) for n in range(30, 60)).encode())
    )
    half = (
        json.dumps({"text": prose(60)}).encode() + b"\n" + b'{"text": "\xff\xfe"}\n' + b'\xef\xbb\xbf{"text": "bom"}\n'
    )
    frame = pa.compress(half, "zstd", asbytes=True)
    (folder / "c.jsonl.zst").write_bytes(frame + pa.compress(b"\n" * 9000, "zstd", asbytes=True) + frame[:-9])
    near = [prose(n).removesuffix(".") + " again." for n in range(10)]
    pq.write_table(pa.table({"text": [*near, None, prose(70)]}), folder / "d.parquet", row_group_size=4)
    (folder / "src").mkdir()
    for n in range(6):
        (folder / "src" / f"m{n}.py").write_text(code(n))
    (folder / "src" / "nul.py").write_bytes(code(7).encode() + b"\0")
    (folder / "src" / "crlf.md").write_bytes(b"\xef\xbb\xbf" + prose(80).replace(". ", ".\r\n").encode())
    with zipfile.ZipFile(folder / "e.zip", "w") as archive:
        archive.writestr("x.txt", prose(90))
        archive.writestr("../y.txt", prose(91))
        archive.writestr("same.txt", prose(3))
    with tarfile.open(folder / "f.tar.gz", "w:gz") as tar:
        tar.add(folder / "src" / "m1.py", "copy/m1.py")
        tar.add(folder / "a.jsonl", "again.jsonl")
    return folder


def config(inputs: Path, out: Path, **settings: Any) -> PrepareConfig:
    """No quality model: made-up sentences would not pass."""
    return PrepareConfig(inputs=(str(inputs),), out=str(out), **{"quality": "off", **settings})


def contents(out: Path) -> dict[str, bytes]:
    """All shards and the index, but for what holds times."""
    files = [path for path in out.rglob("*") if path.is_file() and not path.name.startswith("report.")]
    assert not (out / ".work").exists()
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks also of little."""
    monkeypatch.setattr(prepare, "CHUNK_ITEMS", 25)


def test_every_record_is_accounted_for(inputs: Path, tmp_path: Path) -> None:
    """Read = kept + dropped, for known reasons; repeated texts stay once; labels, places and reports are right."""
    report = prepare.prepare(config(inputs, tmp_path / "out"))
    assert report["records"] == report["documents"] + sum(report["dropped"].values())
    dropped = report["dropped"]
    wanted = {"not_json": 2, "no_text": 9, "surrogates": 2, "nul": 1, "words_few": 3, "exact_duplicate": EXACT}
    assert {name: dropped[name] for name in wanted} == wanted
    assert dropped["not_utf8"] == 1 and dropped["near_duplicate"] == 10 and len(dropped) == 8
    assert report["files_left_out"] == {"truncated": 1, "unsafe_path": 1}
    assert report["notes"] == {"byte-order mark taken off": 1, "line ends made plain": 1}
    assert set(report["explained"]) == {*dropped, *report["files_left_out"]} <= set(EXPLAINED)
    for name in dropped:
        assert report["examples"][name], name
    near = report["examples"]["near_duplicate"][0]
    assert near["similarity"] >= 0.8 and near["where"].endswith("d.parquet:1") and near["of"].endswith("a.jsonl:1")
    shards = {path.name: TextShard(path) for path in (tmp_path / "out").glob("*/*.shard")}
    texts = [shard.record(n).fields["text"] for shard in shards.values() for n in range(len(shard))]
    assert len(texts) == len(set(texts)) == report["documents"]
    assert {prose(n) for n in (*range(61), 70, 90)} <= set(texts) and prose(91) not in texts
    assert "\n".join(prose(80).split(". ")).count("\n") == 8 and prose(80).replace(". ", ".\n") in texts
    assert set(report["domains"]) == {"web", "code"}
    assert len(shards["code-00000.shard"]) == 6
    assert shards["code-00000.shard"].where()[:2] == [f"{inputs}/f.tar.gz!copy/m1.py", f"{inputs}/src/m0.py"]
    assert as_text(report) == (tmp_path / "out" / "report.txt").read_text()
    assert as_page(report) == (tmp_path / "out" / "report.html").read_text()
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert sum(line["documents"] for line in index["shards"]) == index["documents"] == report["documents"]


def test_workers_and_chunks_do_not_matter(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shards, byte for byte; shards are cut at their size."""
    for out, count, number, size in (("a", 25, 1, 128), ("b", 7, 3, 128)):
        monkeypatch.setattr(prepare, "CHUNK_ITEMS", count)
        prepare.prepare(config(inputs, tmp_path / out, workers=number, shard_mib=size))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    monkeypatch.setattr(prepare, "MIB", 8000)
    prepare.prepare(config(inputs, tmp_path / "c", shard_mib=1))
    shards = sorted((tmp_path / "c").glob("*/*.shard"))
    assert len(shards) > 4 and all((path / "text.bin").stat().st_size <= 8000 for path in shards)
    many, few = open_source(tmp_path / "c"), open_source(tmp_path / "a")
    assert [many.key(n) for n in range(len(many))] == [few.key(n) for n in range(len(few))]


class Stopped(Exception):
    """What stops a run in these tests."""


def stop_at(
    monkeypatch: pytest.MonkeyPatch, number: int, before: Callable[[journal.Work, dict[str, Any]], None]
) -> None:
    """Before line `number` of the journal is written, do something that ends the run."""
    real, lines = journal.Work.add, [0]

    def add(work: journal.Work, line: dict[str, Any]) -> None:
        lines[0] += 1
        if lines[0] == number:
            before(work, line)
        real(work, line)

    monkeypatch.setattr(journal.Work, "add", add)


def interrupt(work: journal.Work, line: dict[str, Any]) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def half_a_line(work: journal.Work, line: dict[str, Any]) -> None:
    """The power goes while a line is written."""
    with (work.path / "journal.jsonl").open("a") as file:
        file.write('0123456789abcdef {"kind": "chu')
    raise Stopped


def disk_full(work: journal.Work, line: dict[str, Any]) -> None:
    """No room for the line."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work.path))


def test_a_run_goes_on_wherever_it_was_stopped(inputs: Path, tmp_path: Path) -> None:
    """At each line of the journal, in three ways by turns; the result is that of a run that was never stopped."""
    prepare.prepare(config(inputs, tmp_path / "whole"))
    wanted = contents(tmp_path / "whole")
    out, number, stops = tmp_path / "out", 1, (interrupt, half_a_line, disk_full)
    while True:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, 2 if number > 1 else 1, stops[number % 3])
            try:
                prepare.prepare(config(inputs, out))
                break
            except (Stopped, KeyboardInterrupt, OSError):
                assert not (out / "index.json").exists()
        number += 1
        assert number < 40
    assert number > 8
    plan = json.loads(wanted.pop("index.json"))
    found = contents(out)
    index = json.loads(found.pop("index.json"))
    assert found == wanted
    assert {**index, "plan": 0} == {**plan, "plan": 0}
    assert (
        json.loads((out / "report.json").read_text())["dropped"]
        == json.loads((tmp_path / "whole" / "report.json").read_text())["dropped"]
    )


def test_a_killed_run_goes_on(inputs: Path, tmp_path: Path) -> None:
    """SIGKILL, which nothing can answer; its workers go with it."""
    prepare.prepare(config(inputs, tmp_path / "whole"))
    for number in (2, 5):
        child = os.fork()
        if not child:
            try:
                with pytest.MonkeyPatch.context() as patch:
                    stop_at(patch, number, lambda work, line: os.kill(os.getpid(), signal.SIGKILL))
                    prepare.prepare(config(inputs, tmp_path / "out", workers=2))
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert (tmp_path / "out" / ".work" / "journal.jsonl").exists()
    prepare.prepare(config(inputs, tmp_path / "out"))
    found, wanted = contents(tmp_path / "out"), contents(tmp_path / "whole")
    assert {name: data for name, data in found.items() if name != "index.json"} == {
        name: data for name, data in wanted.items() if name != "index.json"
    }


def test_a_stop_while_results_are_put_in_place(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first folder and the second."""
    real, moved = os.replace, []

    def replace(source: Any, target: Any) -> None:
        if Path(target).parent == tmp_path / "out" and Path(target).name in DOMAINS:
            moved.append(target)
            if len(moved) == 2:
                raise Stopped
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(prepare.os, "replace", replace)
        with pytest.raises(Stopped):
            prepare.prepare(config(inputs, tmp_path / "out"))
    report = prepare.prepare(config(inputs, tmp_path / "out"))
    assert len(open_source(tmp_path / "out")) == report["documents"] > 60


def test_a_full_disk_in_a_worker_is_named(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the file's name, and the run goes on once there is room."""
    with monkeypatch.context() as patch:

        def full(path: Path, *rest: Any) -> str:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        patch.setattr(workers, "write_chunk", full)
        with pytest.raises(OSError, match=r"No space left on device: .*000000\.safetensors"):
            prepare.prepare(config(inputs, tmp_path / "out"))
    assert prepare.prepare(config(inputs, tmp_path / "out"))["documents"] > 60


def test_a_worker_that_is_killed_is_named(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does for want of memory."""
    with monkeypatch.context() as patch:
        patch.setattr(workers, "write_chunk", lambda *rest: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(DataError, match="a worker process was ended from outside"):
            prepare.prepare(config(inputs, tmp_path / "out"))
    assert prepare.prepare(config(inputs, tmp_path / "out"))["documents"] > 60


def test_a_finished_run_is_left_as_it_is(inputs: Path, tmp_path: Path) -> None:
    """The same command again does nothing; another one is refused, unless it begins again."""
    out = tmp_path / "out"
    report = prepare.prepare(config(inputs, out))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert prepare.prepare(config(inputs, out, workers=2)) == report
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    with pytest.raises(DataError, match="holds data prepared otherwise"):
        prepare.prepare(config(inputs, out, similarity=0.0))
    (out / "notes.txt").write_text("mine")
    again = prepare.prepare(config(inputs, out, similarity=0.0), restart=True)
    assert again["documents"] == report["documents"] + 10 and (out / "notes.txt").read_text() == "mine"


def test_an_unfinished_run_of_another_task_is_refused(inputs: Path, tmp_path: Path) -> None:
    """Other settings, and files that have changed, are named; so are damaged leftovers."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3, half_a_line)
        with pytest.raises(Stopped):
            prepare.prepare(config(inputs, out))
    with pytest.raises(DataError, match="begun with another --min-quality"):
        prepare.prepare(config(inputs, out, min_quality=0.5))
    chunk = next((out / ".work" / "chunks").glob("000000*"))
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1] + b"x")
    with pytest.raises(DataError, match=r"000000\.safetensors: missing or damaged; begin again with --restart"):
        prepare.prepare(config(inputs, out))
    chunk.write_bytes(data)
    lines = (out / ".work" / "journal.jsonl").read_bytes()
    (out / ".work" / "journal.jsonl").write_bytes(b"x" + lines + b"\n")
    with pytest.raises(DataError, match=r"journal\.jsonl: damaged"):
        prepare.prepare(config(inputs, out))
    (out / ".work" / "journal.jsonl").write_bytes(lines)
    (inputs / "a.jsonl").write_text(json.dumps({"text": prose(500)}) + "\n")
    with pytest.raises(DataError, match="begun with another state of the input files"):
        prepare.prepare(config(inputs, out))
    assert prepare.prepare(config(inputs, out), restart=True)["documents"] > 30


def test_folders_that_are_not_ours(inputs: Path, tmp_path: Path) -> None:
    """A file, a folder with other files, and one that another process works in."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file"):
        prepare.prepare(config(inputs, tmp_path / "file"))
    with pytest.raises(DataError, match="holds other files and is left alone"):
        prepare.prepare(config(inputs, inputs))
    (tmp_path / "site" / "web").mkdir(parents=True)
    (tmp_path / "site" / "index.json").write_text('{"name": "of something else"}')
    with pytest.raises(DataError, match="holds other files and is left alone"):
        prepare.prepare(config(inputs, tmp_path / "site"), restart=True)
    assert (tmp_path / "site" / "web").is_dir()
    with (
        journal.work_in(tmp_path / "busy"),
        pytest.raises(DataError, match="another process is preparing data there"),
    ):
        prepare.prepare(config(inputs, tmp_path / "busy"))


def test_the_result_may_lie_inside_the_input(inputs: Path) -> None:
    """It is not read, and the same command again finds everything done."""
    report = prepare.prepare(config(inputs, inputs / "out"))
    assert prepare.prepare(config(inputs, inputs / "out")) == report
    with pytest.raises(DataError, match="prepared otherwise"):
        prepare.prepare(config(inputs, inputs / "out", similarity=0.0))
    again = prepare.prepare(config(inputs, inputs / "out", similarity=0.0), restart=True)
    assert again["documents"] == report["documents"] + 10 and again["files_left_out"]["output"] == 1


def test_an_input_that_changes_meanwhile_is_named(inputs: Path, tmp_path: Path) -> None:
    """What was read of it is of two states."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 2, lambda work, line: (inputs / "a.jsonl").write_text("{}\n") and None)
        with pytest.raises(DataError, match=r"a\.jsonl: has changed while it was read; begin again with --restart"):
            prepare.prepare(config(inputs, tmp_path / "out"))


def test_strict_stops_at_what_cannot_be_read(inputs: Path, tmp_path: Path) -> None:
    """The first of it, by name; without it everything is counted."""
    with pytest.raises(DataError, match=r"c\.jsonl\.zst(:\d+)?: (truncated|cut off)"):
        prepare.prepare(config(inputs, tmp_path / "out", strict=True))


def test_token_ids_in_place_of_text(inputs: Path, tmp_path: Path) -> None:
    """With a tokenizer, shards are those that `write_shard` makes of the same documents."""
    tokenizer = Tokenizer.train([prose(n) for n in range(20)], 700)
    tokenizer.save(tmp_path / "tok")
    prepare.prepare(config(inputs, tmp_path / "text"))
    report = prepare.prepare(config(inputs, tmp_path / "ids", tokenizer=str(tmp_path / "tok")))
    ids, text = open_source(tmp_path / "ids", tokenizer), open_source(tmp_path / "text")
    assert len(ids) == len(text) == report["documents"]
    for n in (0, 5, len(ids) - 1):
        assert tokenizer.decode(ids.record(n).fields["ids"][1:-1].tolist()) == text.record(n).fields["text"]
    assert isinstance(Shard(next((tmp_path / "ids").glob("*/*.shard"))).vocabulary, str)
    assert all(line["tokens"] > 0 for line in report["shards"])


def test_nothing_is_kept(tmp_path: Path) -> None:
    """A result without a shard, and a report that says why."""
    (tmp_path / "a.jsonl").write_text('{"text": "too short"}\n')
    report = prepare.prepare(config(tmp_path / "a.jsonl", tmp_path / "out"))
    assert report["documents"] == 0 and report["dropped"] == {"words_few": 1} and report["shards"] == []


def test_given_labels_rules_and_fields(tmp_path: Path) -> None:
    """A label of the command line or of the record, rules left out, another field, a path's suffix."""
    lines = [
        {"body": prose(1), "domain": "mathematics"},
        {"body": prose(2), "domain": "nonsense"},
        {"body": "short but kept"},
        {"body": prose(3), "path": "src/x.py"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = {
        "text_field": "body",
        "skip_rules": ("words_few", "sentences_few", "line_ends", "short_lines", "lines_few", "line_mean"),
    }
    report = prepare.prepare(config(tmp_path / "a.jsonl", tmp_path / "out", **settings))
    assert report["dropped"] == {} and report["domains"]["mathematics"]["documents"] == 1
    assert report["domains"]["code"]["documents"] == 1
    one = PrepareConfig(
        inputs=(f"knowledge={tmp_path / 'a.jsonl'}",), out=str(tmp_path / "k"), quality="off", **settings
    )
    assert set(prepare.prepare(one)["domains"]) == {"knowledge"}
    with pytest.raises(DataError, match="--skip-rules: no rule 'no_such'"):
        prepare.prepare(config(tmp_path / "a.jsonl", tmp_path / "x", skip_rules=("no_such",)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": ()},
        {"similarity": 0.1},
        {"min_quality": float("nan")},
        {"shard_mib": 0},
        {"workers": 0},
        {"language": "de"},
        {"num_hashes": 1},
        {"max_ratio": 1},
        {"max_document_mib": 0},
        {"text_field": ""},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    """By the flag's name."""
    with pytest.raises(ConfigError, match=r"^(--[a-z-]+|IN): "):
        PrepareConfig(**{"inputs": ("x",), "out": "y", **wrong})


def test_quality_drops_and_scores_are_kept(tmp_path: Path) -> None:
    """Word salad goes by its score; the others' scores are in their shards."""
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "kda.md").read_text(encoding="utf-8")
    body = " ".join(line for line in page.split("\n") if line and line[0].isalpha())[:3000] + " The end. That is all."
    words = body.split()
    random.Random(0).shuffle(words)
    salad = " ".join(words) + ". So it is. There it goes. It ends."
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text, "domain": "web"}) for text in (body, salad)))
    settings = PrepareConfig(inputs=(str(tmp_path / "a.jsonl"),), out=str(tmp_path / "out"), skip_rules=("braces",))
    report = prepare.prepare(settings)
    assert report["dropped"] == {"quality": 1} and "score" in report["examples"]["quality"][0]["where"]
    (path,) = (tmp_path / "out").glob("*/*.shard")
    assert TextShard(path).quality[0] > 0.1 and sum(report["quality"]["tenths"]) == 1
    assert np.isfinite(TextShard(path).quality).all()


def test_restart_leaves_a_folder_alone_that_another_process_works_in(inputs: Path, tmp_path: Path) -> None:
    """What the other process has done is still there."""
    out = tmp_path / "out"
    with journal.work_in(out) as work:
        work.open({"settings": {}})
        work.add({"kind": "other"})
        with pytest.raises(DataError, match="another process is preparing data there"):
            prepare.prepare(config(inputs, out), restart=True)
        assert (out / ".work" / "journal.jsonl").read_text().count("\n") == 1
    prepare.prepare(config(inputs, out), restart=True)
    assert not (out / ".work").exists()


def test_input_inside_the_result_is_refused(inputs: Path, tmp_path: Path) -> None:
    """A restart would remove what it is to read, by whatever name."""
    out = tmp_path / "out"
    prepare.prepare(config(inputs, out))
    before = contents(out)
    (tmp_path / "link").symlink_to(out)
    for given in (out, out / "web", tmp_path / "link" / "code"):
        with pytest.raises(DataError, match="lies in the folder that --out names"):
            prepare.prepare(config(given, out), restart=True)
    assert contents(out) == before


def test_another_tokenizer_of_the_same_name_is_another_task(inputs: Path, tmp_path: Path) -> None:
    """Else a run that goes on would hold token ids of two vocabularies."""
    texts = [prose(number) for number in range(30)]
    Tokenizer.train(texts, 560).save(tmp_path / "tokenizer")
    settings = config(inputs, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))
    plan = journal.make_plan(settings, [], "") | {"vocabulary": "of another"}
    with journal.work_in(tmp_path / "out") as work:
        work.open(plan)
        with pytest.raises(DataError, match="another state of the --tokenizer"):
            work.open(plan | {"vocabulary": "new"})
    prepare.prepare(settings, restart=True)
    Tokenizer.train(texts, 600).save(tmp_path / "tokenizer")
    with pytest.raises(DataError, match="prepared otherwise"):
        prepare.prepare(settings)


@pytest.mark.parametrize("name", ["plan.json", "journal.jsonl", "duplicates.safetensors", "shards", "chunks"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_work_folder_that_is_damaged(inputs: Path, tmp_path: Path, name: str, is_gone: bool) -> None:
    """Each part of it is made again, or named in one line; never half believed."""
    prepare.prepare(config(inputs, tmp_path / "whole"))
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "_deliver", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(config(inputs, out))
    place = out / ".work" / name
    place = next(iter(sorted(place.iterdir()))) if name == "chunks" else place
    if name == "shards":
        shutil.rmtree(place / "web")
    elif is_gone:
        place.unlink()
    else:
        place.write_bytes(b"\0" + place.read_bytes()[1:])
    try:
        prepare.prepare(config(inputs, out))
    except DataError as error:
        assert "begin again with --restart" in str(error)
        assert name in ("plan.json", "journal.jsonl", "chunks")
        prepare.prepare(config(inputs, out), restart=True)
    assert contents(out) == contents(tmp_path / "whole")
