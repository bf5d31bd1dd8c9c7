"""The first page can be followed: its scripts run, and its job survives kills and resumes from its checkpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .pages import ROOT, examples

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

START = ROOT / "docs" / "start.md"
JOB = [sys.executable, "-m", "flightedl_tools", "run", "train.py", "--pservers", "2", "--no-page"]
WEIGHTS = re.compile(r"weights \[(.*?)\]")


def weights(output: str) -> np.ndarray:
    found = WEIGHTS.search(output)
    assert found is not None, output
    return np.array(found[1].split(), float)


def script(folder: Path, group: str, name: str) -> None:
    (example,) = examples(START, group)
    (folder / name).write_text(example.text)


def pid_of(output: str, address: re.Match[str], process: str, folder: Path) -> int:
    status = [sys.executable, "-m", "flightedl_tools", "status", *address[0].split()]
    shown = subprocess.run(status, cwd=folder, capture_output=True, text=True, timeout=30, check=True).stdout
    found = re.search(rf"^{process} .*?pid (\d+)", shown, re.MULTILINE)
    assert found is not None, output + shown
    return int(found[1])


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    for group, name in (("data", "make_data.py"), ("loop", "loop.py"), ("train", "train.py")):
        script(tmp_path, group, name)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, timeout=60, check=True)
    alone = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    expected = weights(alone.stdout)

    command = [*JOB, "--trainers", "2", "--checkpoint", "checkpoints"]
    lines: list[str] = []
    victims = ["trainer-0", "pserver-0"]
    address, is_stopped = None, False
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            address = address or re.search(r"--etcd \S+ --job \S+(?=`)", line)
            epoch = re.search(r"epoch (\d+)/20", line)
            if epoch is None or address is None:
                continue
            if victims and int(epoch[1]) >= 3:
                os.kill(pid_of("".join(lines), address, victims.pop(0), tmp_path), signal.SIGKILL)
            elif not victims and int(epoch[1]) >= 8 and not is_stopped:
                job.send_signal(signal.SIGINT)
                is_stopped = True
    output = "".join(lines)
    assert job.returncode == 130, output
    assert output.count("killed by SIGKILL") == 2, output
    assert "continue from it with: " in output, output

    command = [*JOB[:-3], "--resume", "--trainers", "3", "--pservers", "1", "--no-page", "--checkpoint", "checkpoints"]
    resumed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert np.allclose(weights(resumed.stdout + resumed.stderr), expected, atol=0.1)
    assert list(tmp_path.glob("runs/*/model.npz"))
