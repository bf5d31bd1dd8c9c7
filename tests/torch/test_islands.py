"""Islands of docs/local-sgd.md: trainers that are groups of DDP ranks, one of which dies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import flightedl as fe
from flightedl.config import child_environment
from flightedl.messages.status import StatusReply

from ..docs.pages import ROOT, examples
from .page import prepare


class Island:
    """Two ranks that torchrun has started."""

    def __init__(self, address: str, output: Path) -> None:
        self._output = output
        (script,) = examples(ROOT / "docs" / "local-sgd.md", "island")
        # No island takes batches before all have connected, and none is done before another one is killed.
        gate = "        while not Path('go').exists():\n            time.sleep(0.05)\n"
        text = script.text.replace("        for x, label in", f"{gate}        for x, label in")
        text = text.replace("    inner.zero_grad()\n", "    time.sleep(0.02)\n    inner.zero_grad()\n")
        path = output.with_suffix(".py")
        path.write_text(f"import time\nfrom pathlib import Path\n{text}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
        settings = {"FLIGHTEDL_ETCD": address, "FLIGHTEDL_JOB": "islands", "OMP_NUM_THREADS": "1"}
        with output.open("w") as file:
            self._process = subprocess.Popen(
                command, env=child_environment() | settings, stdout=file, stderr=subprocess.STDOUT
            )

    def kill_one(self) -> None:
        """Kill the rank that does not speak to the job."""
        ranks = [each for each in psutil.Process(self._process.pid).children() if each.environ().get("RANK") == "1"]
        ranks[0].kill()

    def end(self) -> int:
        """Wait for the end of torchrun, and return its exit code."""
        return self._process.wait(90)

    def kill(self) -> None:
        """Kill everything, if it has not ended."""
        if self._process.poll() is None:
            for each in (*psutil.Process(self._process.pid).children(), self._process):
                each.kill()
            self._process.wait()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def said(self) -> str:
        return self._output.read_text()


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_island_that_dies_leaves_its_batches_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    with (
        fe.local(pservers=1, job="islands") as cluster,
        cluster.status() as status,
        contextlib.ExitStack() as stack,
    ):
        islands = [Island(cluster.etcd_address, tmp_path / f"island-{number}") for number in range(2)]
        for each in islands:
            stack.callback(each.kill)

        def wait_until(is_so: Callable[[StatusReply], bool]) -> None:
            while not is_so(status.read(10)):
                assert islands[0].is_running, islands[0].said
                time.sleep(0.05)

        wait_until(lambda found: len(found.trainers) == 2)
        Path("go").touch()
        wait_until(lambda found: found.batches >= 4)
        islands[1].kill_one()
        assert islands[1].end() != 0
        assert islands[0].end() == 0, islands[0].said
        found = status.read(10)
        assert (found.epoch, found.failed) == (20, [])
        assert found.tasks.done == found.tasks.total
