"""The command line: fast help that teaches, one-line errors, and the exit codes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openk3 import cli, recipes
from openk3.commands import doctor, flags
from openk3.commands.errors import UserError, is_user_error
from openk3.config.model import ConfigError
from openk3.runtime.staging import staged_folder


def openk3(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent), **(env or {})}
    command = [sys.executable, "-m", "openk3", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


def cpu_seconds(*arguments: str) -> float:
    """Processor time of one command: unlike the clock, not disturbed by what else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert openk3(*arguments).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_answers_within_half_a_second(command: str) -> None:
    """`openk3 --help` and every `openk3 COMMAND --help`, from starting Python to the last line."""
    arguments = [command, "--help"] if command else ["--help"]
    assert min(cpu_seconds(*arguments) for _ in range(3)) < 0.5


def test_help_names_every_command_once_with_a_line() -> None:
    """The overview is the list of commands that exist, each with a parser."""
    text = cli.help_text()
    assert set(cli.COMMANDS) == set(flags.COMMANDS)
    for name, line in cli.COMMANDS.items():
        assert f"  {name:<12}{line}" in text
    assert all(command.split()[1] in cli.COMMANDS for command in cli.EXAMPLES)


def test_no_argument_prints_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    """Help is never an error."""
    assert cli.main([]) == 0
    assert capsys.readouterr().out == cli.help_text() + "\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`openk3 --version` prints the package's version."""
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "openk3 0.1.0\n"


@pytest.mark.parametrize(("word", "hint"), [("quickstrat", "openk3 quickstart"), ("xyzzy", "openk3 --help")])
def test_unknown_command_is_one_line_with_a_hint(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt command names the nearest one."""
    assert cli.main([word]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and word in err and hint in err


def test_misspelt_flag_suggests_the_right_one() -> None:
    """The parser knows every flag of the command."""
    result = openk3("plan", "k3", "--contxt", "5")
    assert result.returncode == 2 and "--context" in result.stderr and "Traceback" not in result.stderr


def run_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """The exit code when the doctor command raises `error`."""

    def raise_it(_: object) -> None:
        raise error

    monkeypatch.setattr(doctor, "run", raise_it)
    return cli.main(["doctor"])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("a.txt: is\n empty"), "openk3: a.txt: is empty\n"),
        (ConfigError("optim.lr: must be positive"), "openk3: optim.lr: must be positive\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "b.txt"), "openk3: b.txt: No such file\n"),
        (OSError(errno.ENOSPC, "No space left on device"), "openk3: standard output: No space left on device\n"),
        (UserError("\x1b[2Ja.txt: is\r\x07 empty"), "openk3: \ufffd[2Ja.txt: is \ufffd empty\n"),
        (OSError(errno.ENOENT, "No such file", b"b\xff"), "openk3: b\ufffd: No such file\n"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message alone, on stderr."""
    assert run_with(monkeypatch, error) == 2
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("error", [ValueError("inside"), KeyError("x"), RuntimeError("y")])
def test_faults_of_the_program_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is swallowed."""
    with pytest.raises(type(error)):
        run_with(monkeypatch, error)


def test_interrupt_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends any command with 130 and a word."""
    assert run_with(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "\nopenk3: stopped\n"


def test_closed_pipe_is_silent() -> None:
    """`openk3 plan k3 | head -1` prints no error."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    command = [sys.executable, "-m", "openk3", "plan", "k3"]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, env=environment, timeout=60)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")


def test_terminal_that_cannot_show_a_character_gets_another(tmp_path: Path) -> None:
    """Names of files and texts of models may hold anything."""
    path = tmp_path / "run-\u65e5-\udcff"
    path.mkdir()
    (path / "config.json").write_text(recipes.model("tiny").to_json())
    result = openk3("plan", str(path), env={"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0 and "run-?-?" in result.stdout


def test_only_our_own_value_errors_are_the_users() -> None:
    """A plain ValueError may come from anywhere."""
    assert is_user_error(ConfigError("x")) and is_user_error(UserError("x"))
    assert not is_user_error(ValueError("x")) and not is_user_error(UnicodeDecodeError("utf-8", b"", 0, 1, "x"))


def test_errors_from_the_outside_leave_one_line(tmp_path: Path) -> None:
    """The whole way through a process: exit code 2 and one line."""
    result = openk3("plan", "nothing-here", cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "nothing-here" in result.stderr


@pytest.mark.parametrize("command", [["--help"], ["plan", "--help"], ["plan", "k3"], ["doctor"]])
def test_a_full_disk_behind_standard_output_is_one_line(command: list[str]) -> None:
    """`openk3 plan k3 > /full/disk/plan.txt`, help included."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "openk3", *command]
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (2, "openk3: standard output: No space left on device\n")


@pytest.mark.parametrize("command", [["--help"], ["plan", "--help"]])
def test_help_into_a_closed_pipe_is_silent(command: list[str]) -> None:
    """`openk3 --help | head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    words = [sys.executable, "-m", "openk3", *command]
    result = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, env=environment, timeout=60)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")


def test_closed_streams_are_no_fault() -> None:
    """A daemon may start the program without any: `openk3 plan k3 <&- >&- 2>&-`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    words = f"{sys.executable} -m openk3 plan k3 <&- >&- 2>&-; exit $?"
    assert subprocess.run(["sh", "-c", words], env=environment, timeout=60).returncode == 0


def test_sigterm_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary folders go as they do after an exception; the handler is the caller's again afterwards."""
    before = signal.getsignal(signal.SIGTERM)

    def write(_: object) -> None:
        with staged_folder(tmp_path / "m", lambda path: True) as folder:
            (folder / "a").write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)
            (folder / "b").write_text("not reached")

    monkeypatch.setattr(doctor, "run", write)
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor"])
    assert end.value.code == 143 and os.listdir(tmp_path) == [] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["pretrain", "tiny", "--stesp", "3"], "Unrecognized options: --stesp, 3; perhaps you meant --steps "),
        (["pretrain", "tiny", "--steps", "x"], "Error parsing --steps: invalid literal"),
        (["quickstart", "--minutes", "abc"], "Error parsing --minutes"),
        (["tokenizer"], "Expected one of {train, encode}"),
        (["convert", "source"], "Missing from openk3 convert: TARGET"),
        (["plan", "--context", "a" * 150], "'" + "a" * 150 + "'"),
        (["pretrain", "tiny", "--optim.lr", "-1"], "openk3: optim.lr: must be positive, got -1.0 (see"),
    ],
)
def test_wrong_flags_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong, the nearest flag and where to read more, without the parser's frame; exit code 2."""
    with pytest.raises(SystemExit) as end:
        flags.parse(arguments[0], arguments[1:])
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.count("\n") == 1 and said in errors
    assert errors.startswith("openk3: ") and errors.endswith(f"(see openk3 {arguments[0]} --help)\n")


@pytest.mark.parametrize("command", ["chat", "pretrain"])
@pytest.mark.parametrize("columns", ["1", "7"])
def test_help_ends_in_the_narrowest_terminal(command: str, columns: str) -> None:
    """Where words do not fit they are cut at some width; the help once never came to an end."""
    script = f"from openk3.cli import main; main(['{command}', '--help'])"
    environment = os.environ | {"COLUMNS": columns}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert done.returncode == 0 and "usage: openk3" in done.stdout
