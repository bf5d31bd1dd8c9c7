"""Command line of ``flightedl run``."""

from __future__ import annotations

import pytest

from flightedl_tools.main import run_command_line
from flightedl_tools.run import resume_command


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ("run a.py --checkpoint x", "flightedl run --resume a.py --checkpoint x"),
        ("run a.py --checkpoint x --resume", "flightedl run a.py --checkpoint x --resume"),
        ("run a.py --checkpoint x --resume=auto", "flightedl run a.py --checkpoint x --resume=auto"),
        ("--debug run a.py --checkpoint x -- --lr 1", "flightedl --debug run --resume a.py --checkpoint x -- --lr 1"),
    ],
)
def test_the_command_to_resume_is_printed(given: str, again: str) -> None:
    assert resume_command(given.split()) == again


def test_arguments_are_quoted_for_the_shell() -> None:
    assert resume_command(["run", "a b.py", "--lr", "$x"]) == "flightedl run --resume 'a b.py' --lr '$x'"
    assert resume_command([]) == ""


@pytest.mark.parametrize("more", ["--pservers=1", "--trainers=2"])
def test_a_group_has_neither_pservers_nor_other_trainers(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["run", "--nproc-per-node", "2", more, "train.py"]) == 2
    assert "omit --pservers and --trainers" in capsys.readouterr().err
