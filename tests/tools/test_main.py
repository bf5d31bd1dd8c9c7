from __future__ import annotations

import importlib
import io
import sys
from importlib.metadata import version

import click
import pytest
from click.testing import CliRunner

from flightedl.errors import JobFailedError, NotFoundError, UnavailableError, UsageError
from flightedl.launch.progress import JobConsole
from flightedl_tools import main as main_module
from flightedl_tools.main import COMMANDS, SECTIONS, command, run_command_line


def failing(error: BaseException) -> click.Command:
    @click.command()
    def fail() -> None:
        raise error

    return fail


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> object:
    """Function that adds a subcommand ``fail``, which raises an error."""

    def add(error: BaseException) -> None:
        monkeypatch.setitem(command.commands, "fail", failing(error))

    return add


def test_help_lists_every_command_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_module, _attribute, text) in COMMANDS.items():
        assert name in shown
        assert text in shown
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(COMMANDS)


def test_the_version_equals_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["--version"]) == 0
    assert version("flightedl") in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(command, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_listed_help_equals_that_of_the_command(name: str) -> None:
    module, attribute, text = COMMANDS[name]
    loaded = getattr(importlib.import_module(module), attribute)
    assert loaded.get_short_help_str(200).rstrip(".") == text.rstrip(".")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no etcd"), 2),
        (NotFoundError("no such job"), 2),
        (JobFailedError("lost"), 3),
        (UnavailableError("silent"), 1),
    ],
)
def test_a_flightedl_error_is_one_line(
    fail_with, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    fail_with(error)
    assert run_command_line(["fail"]) == code
    assert capsys.readouterr().err == f"flightedl: {error}\n"


def test_debug_keeps_the_traceback(fail_with) -> None:
    fail_with(UsageError("no etcd"))
    with pytest.raises(UsageError):
        run_command_line(["--debug", "fail"])


def test_a_bug_keeps_its_traceback(fail_with) -> None:
    fail_with(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        run_command_line(["fail"])


def test_ctrl_c_exits_with_130(fail_with) -> None:
    fail_with(KeyboardInterrupt())
    assert run_command_line(["fail"]) == 130


@pytest.mark.parametrize("arguments", [["absent"], ["run"], ["run", "x.py", "--trainers", "0"], ["--absent"]])
def test_a_wrong_command_line_exits_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run_command_line(arguments) == 2
    assert "Error:" in capsys.readouterr().err


def test_main_ends_the_process_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["flightedl", "absent"])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 2


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_that_lacks_a_character_gets_its_code(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))

    def show(**_: object) -> None:
        JobConsole(width=80).print("trainer-0 | \u2192 1", soft_wrap=True)
        click.echo("\u65e5.csv")

    monkeypatch.setattr(command, "main", show)
    with pytest.raises(SystemExit) as ended:
        main_module.main(["status"])
    sys.stdout.flush()
    # click itself writes UTF-8 if the encoding is ASCII, which it considers a mistake.
    name = "\u65e5".encode() if encoding == "ascii" else b"\\u65e5"
    assert (ended.value.code, written.getvalue()) == (0, b"trainer-0 | \\u2192 1\n" + name + b".csv\n")
