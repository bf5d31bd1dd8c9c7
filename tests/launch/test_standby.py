"""A standby pserver takes over when its pserver is killed. Nothing is lost, although the job has no checkpoints."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

import flightedl as fe
from flightedl.errors import UsageError
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.status import JobStatus
from flightedl.messages.status import ServerStatus
from flightedl.testing.contracts.coordinator import eventually

_WAIT_S = 200.0


def _pserver(status: JobStatus, index: int, after: int) -> ServerStatus | None:
    """Return the pserver with this index if its generation is higher than ``after``."""
    found = [each for each in status.read(5.0).pservers if each.index == index and each.generation > after]
    return found[0] if found else None


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_standbys_take_over_and_nothing_is_lost(tmp_path: Path, mode: str) -> None:
    arguments = ("--data", str(tmp_path / "data"), "--tables", "--records", "16000", "--epochs", "2", "--pause", "0.02")

    def logged(text: str) -> int:
        return sum(path.read_text().count(text) for path in (tmp_path / "out" / "logs").glob("*.log"))

    def has_copies(count: int, index: int) -> bool:
        return logged(f"a complete copy of pserver {index} has arrived") >= count

    with fe.local(
        pservers=2,
        standby_pservers=2,
        standby_lag_s=0.2,
        output_dir=tmp_path / "out",
        trainers=TrainerProgram("flightedl.examples.ledger", (*arguments, "--mode", mode), 2),
    ) as cluster:
        with cluster.status() as status:
            eventually(lambda: status.read(5.0).tasks.done > 2, timeout_s=_WAIT_S)
            generations = {0: 0, 1: 0}
            for count, index in ((1, 0), (1, 1), (2, 0)):
                eventually(partial(has_copies, count, index), timeout_s=_WAIT_S)
                victim = eventually(partial(_pserver, status, index, generations[index]), timeout_s=_WAIT_S)
                generations[index] = victim.generation
                os.kill(victim.pid, signal.SIGKILL)
        outcome = cluster.outcome(_WAIT_S)
    assert outcome is not None
    assert logged("0 lost, 0 double") == 1
    assert logged("took over the blocks") == 3
    assert not logged("values are lost") + logged("values were lost")


def test_rollback_and_standby_pservers_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="standby pservers cannot be used with the recovery rollback"):
        fe.local(standby_pservers=1, recovery="rollback")


def test_the_number_of_standby_pservers_is_checked() -> None:
    with pytest.raises(UsageError, match="standby_pservers is -1, but must be a number, 0 or more"):
        fe.local(standby_pservers=-1)
