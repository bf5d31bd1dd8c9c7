"""Commands that wait for a master end soon if its etcd does not exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flightedl.errors import EXIT_FAILED


@pytest.mark.parametrize(
    "command",
    [
        ["scale", "pservers", "2"],
        ["scale", "pservers", "--cancel"],
        ["mode", "sync"],
        ["checkpoint", "save"],
    ],
    ids=" ".join,
)
def test_a_command_without_an_etcd_ends_with_one_sentence(command: list[str]) -> None:
    program = [sys.executable, "-m", "flightedl", *command, "--etcd", "127.0.0.1:1", "--job", "digits"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (EXIT_FAILED, "")
    assert done.stderr.startswith("flightedl: etcd at 127.0.0.1:1 cannot be reached: start it")
    assert done.stderr.count("\n") == 1
