"""The first page can be followed: its scripts run, and its job survives kills and resumes from its checkpoint.

The output that this page and the page of the commands show has the shape of what the commands print in this job.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from .pages import ROOT, examples, sections, sessions, sessions_in
from .shapes import COMPARED, shape

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

START, COMMANDS = ROOT / "docs" / "start.md", ROOT / "docs" / "commands.md"
PROGRAM = [sys.executable, "-m", "flightedl_tools"]
JOB = ["run", "train.py", "--trainers", "2", "--pservers", "2", "--checkpoint", "checkpoints2"]
RESUMED = ["run", "--resume", "train.py", "--trainers", "3", "--pservers", "1", "--checkpoint", "checkpoints2"]
WEIGHTS = re.compile(r"weights \[(.*?)\]")


def weights(output: str) -> np.ndarray:
    found = WEIGHTS.search(output)
    assert found is not None, output
    return np.array(found[1].split(), float)


def script(folder: Path, group: str, name: str) -> None:
    (example,) = examples(START, group)
    (folder / name).write_text(example.text)


class Shell:
    """Runs commands in a folder, and keeps all that they print."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.printed: list[str] = []

    def run(self, *command: str, program: Iterable[str] = PROGRAM, timeout_s: float = 300) -> str:
        ran = subprocess.run(
            [*program, *command], cwd=self._folder, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        output = ran.stdout + ran.stderr
        assert ran.returncode == 0, output
        self.printed += output.splitlines()
        return output

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*PROGRAM, *command], cwd=self._folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


def kill(shell: Shell, process: str, address: list[str]) -> None:
    shown = shell.run("status", *address)
    found = re.search(rf"^{process} .*?pid (\d+)", shown, re.MULTILINE)
    assert found is not None, shown
    os.kill(int(found[1]), signal.SIGKILL)


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    for group, name in (("data", "make_data.py"), ("loop", "loop.py"), ("train", "train.py")):
        script(tmp_path, group, name)
    shell.run("make_data.py", program=[sys.executable])
    alone = shell.run("loop.py", program=[sys.executable])
    assert alone in START.read_text(), "the page shows other weights"
    expected = weights(alone)

    victims = ["trainer-0", "pserver-0"]
    address: list[str] = []
    is_stopped = False
    with shell.start(*JOB) as job:
        assert job.stdout is not None
        for line in job.stdout:
            shell.printed.append(line)
            if found := re.search(r"--etcd \S+ --job \S+(?=`)", line):
                address = found[0].split()
            epoch = re.search(r"epoch (\d+)/20", line)
            if epoch is None or not address:
                continue
            if victims and int(epoch[1]) >= 3:
                kill(shell, victims.pop(0), address)
            elif not victims and int(epoch[1]) >= 8 and not is_stopped:
                shell.run("events", *address)
                shell.run("mode", "async", "--push-every", "4", *address)
                job.send_signal(signal.SIGINT)
                is_stopped = True
    output = "".join(shell.printed)
    assert job.returncode == 130, output
    assert output.count("killed by SIGKILL") == 2, output
    assert "continue from it with: " in output, output

    resumed = shell.run(*RESUMED)
    assert np.allclose(weights(resumed), expected, atol=0.1)
    assert list(tmp_path.glob("runs/*/model.npz"))

    shell.run("plot", "runs/train-2")
    shell.run("checkpoint", "list", "checkpoints2")
    shell.run("dataset", "inspect", "data/part-00.parquet", "data/part-01.parquet")
    with shell.start("data", "serve", "data/*.parquet") as serving:
        assert serving.stdout is not None
        for line in serving.stdout:
            shell.printed.append(line)
            if "before torchrun" in line:
                serving.terminate()

    printed = set(map(shape, shell.printed))
    text = sections(COMMANDS)
    commands = "".join(text[f"`flightedl {name}`"] for name in COMPARED)
    shown = [*sessions(START), *sessions_in(commands)]
    lines = [line for block in shown for line in block.splitlines() if line.strip() and not line.startswith("$ ")]
    assert len(lines) > 40
    missing = [line for line in lines if shape(line) not in printed]
    assert not missing, "\n".join([*missing, "", "in place of:", *sorted(printed)])
