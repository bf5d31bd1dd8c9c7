"""Groups that torchrun starts without etcd: each record counts once in the surviving model, and no process remains."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flightedl.config import child_environment
from flightedl.launch.places import free_ports

from .group_trainer import masters_below
from .test_groups import SCRIPT, assert_each_record_counts_once, data, wait_until

__all__ = ["data"]

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(300)]


class Torchrun:
    """A running torchrun whose processes know no etcd."""

    def __init__(self, data: Path, output: Path, ranks: int, *more: str) -> None:
        self.errors = output / f"stderr-{ranks}"
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "1000"]
        command += ["--master-port", str(free_ports(1)[0]), str(SCRIPT), str(data), str(output), *more]
        environment = child_environment(OMP_NUM_THREADS="1")
        environment.pop("FLIGHTEDL_ETCD", None)
        with self.errors.open("a") as errors:
            self.process = subprocess.Popen([sys.executable, *command], env=environment, stderr=errors)
        self.ranks = ranks
        #: All masters that were seen.
        self.masters: set[psutil.Process] = set()

    def rank(self, number: int) -> psutil.Process | None:
        for each in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if each.environ().get("RANK") == str(number):
                    return each
        return None

    @property
    def master(self) -> psutil.Process | None:
        found = masters_below(self.process.pid)
        self.masters.update(found)
        return found[0] if found else None

    @property
    def starts(self) -> int:
        return self.errors.read_text().count("started the group's master")


@contextlib.contextmanager
def torchrun(data: Path, output: Path, ranks: int, *more: str) -> Iterator[Torchrun]:
    launched = Torchrun(data, output, ranks, *more)
    try:
        yield launched
    finally:
        launched.process.terminate()
        launched.process.wait(60)
    for master in launched.masters:
        master.wait(300)


def test_a_group_survives_the_end_of_its_master_in_an_epoch_and_of_rank_0_in_its_last_save(
    data: Path, tmp_path: Path
) -> None:
    with torchrun(data, tmp_path, 2, "pause=0.05", "dies_saving=1") as launched:
        wait_until((tmp_path / "model.pt").exists)
        assert launched.master is not None
        names = [each.name() for each in psutil.Process(launched.process.pid).children(recursive=True)]
        assert not any("etcd" in name for name in names), names
        launched.master.kill()
        assert launched.process.wait(200) == 0, launched.errors.read_text()
    assert (tmp_path / "died").exists()
    # The training is complete, so it is not started a fourth time.
    assert launched.starts == 3
    assert_each_record_counts_once(tmp_path)


def strike(launched: Torchrun, chosen: random.Random) -> None:
    """Kill one process or two, or freeze the master for some seconds."""
    victims = [launched.rank(0), launched.rank(chosen.randrange(launched.ranks)), launched.master]
    kind = chosen.randrange(5)
    with contextlib.suppress(psutil.Error):
        if kind == 4 and victims[2] is not None:
            victims[2].suspend()
            time.sleep(chosen.choice([3.0, 8.0]))
            victims[2].resume()
        for victim in victims[:2] if kind == 3 else [victims[kind % 3]]:
            if victim is not None and kind != 4:
                victim.kill()


@pytest.mark.storm
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dies_saving", [1, 2])
def test_a_storm_of_kills_in_groups_of_changing_sizes(data: Path, tmp_path: Path, dies_saving: int) -> None:
    chosen = random.Random(dies_saving)
    more = "pause=0.2", "epochs=4", f"dies_saving={dies_saving}"
    for number, ranks in enumerate((4, 2, 3)):
        with torchrun(data, tmp_path, ranks, *more, f"batch={12 // ranks}") as launched:
            for _ in range(int(os.environ.get("STRIKES", "10"))):
                wait_until(lambda it=launched: it.master or it.process.poll() is not None, 300.0)
                if launched.process.poll() is not None:
                    break
                time.sleep(chosen.choice([0.5, 3.0, 6.0, 10.0]))
                strike(launched, chosen)
            if number == 2:
                assert launched.process.wait(900) == 0, launched.errors.read_text()
    assert (tmp_path / "died").exists()
    assert_each_record_counts_once(tmp_path, 4)
