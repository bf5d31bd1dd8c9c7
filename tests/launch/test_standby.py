"""A standby pserver takes over when its pserver is killed. Nothing is lost, although the job has no checkpoints."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

import flightedl as fe
from flightedl.adapters.clock import SystemClock
from flightedl.errors import UsageError
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.status import JobStatus, follow_change
from flightedl.messages.scaling import ScaleReply, ScaleRequest
from flightedl.messages.status import ServerStatus
from tests.support.contracts.coordinator import eventually

_WAIT_S = 200.0


def _pserver(status: JobStatus, index: int, after: int) -> ServerStatus | None:
    """Return the pserver with this index if its generation is higher than ``after``."""
    found = [each for each in status.read(5.0).pservers if each.index == index and each.generation > after]
    return found[0] if found else None


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.storm)])
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


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_standbys_follow_while_pservers_leave_are_drained_and_removed(tmp_path: Path) -> None:
    arguments = ("--data", str(tmp_path / "data"), "--tables", "--records", "16000", "--epochs", "3", "--pause", "0.05")
    program = TrainerProgram("flightedl.examples.ledger", arguments, 2)
    with (
        fe.local(
            pservers=2,
            standby_pservers=2,
            standby_lag_s=0.2,
            leave_s=60.0,
            output_dir=tmp_path / "out",
            trainers=program,
        ) as cluster,
        cluster.status() as status,
    ):

        def has_standbys(indexes: set[int]) -> bool:
            """True if exactly these pservers have a standby with a recent copy."""
            found = status.read(5.0).pservers
            recent = {each.index for each in found if each.standby_lag_s is not None and each.standby_lag_s < 5.0}
            return recent == indexes == {each.index for each in found if each.standby}

        def end(index: int, number: signal.Signals) -> ServerStatus:
            """Send a signal to a pserver. Return its successor."""
            before = eventually(partial(_pserver, status, index, 0), timeout_s=_WAIT_S)
            os.kill(before.pid, number)
            return eventually(partial(_pserver, status, index, before.generation), timeout_s=_WAIT_S)

        def blocks_of(index: int) -> int:
            found = _pserver(status, index, 0)
            return 0 if found is None else found.blocks + found.buckets

        eventually(lambda: status.read(5.0).tasks.done > 2 and has_standbys({0, 1}), timeout_s=_WAIT_S)
        end(1, signal.SIGTERM)
        eventually(lambda: blocks_of(0) and blocks_of(1) and has_standbys({0, 1}), timeout_s=_WAIT_S)

        # Blocks may still be moving back to pserver 1.
        follow_change(status.scaling, _WAIT_S, SystemClock())
        status.change("scale", ScaleRequest(drain=[1]), ScaleReply, 10.0)
        assert follow_change(status.scaling, _WAIT_S, SystemClock()).drained == [1]
        eventually(lambda: has_standbys({0, 1}), timeout_s=_WAIT_S)
        end(1, signal.SIGKILL)
        eventually(lambda: blocks_of(1) == 0, timeout_s=_WAIT_S)

        cluster.scale(1)
        eventually(lambda: has_standbys({0}), timeout_s=_WAIT_S)
        end(0, signal.SIGKILL)
        eventually(lambda: has_standbys({0}), timeout_s=_WAIT_S)
        outcome = cluster.outcome(_WAIT_S)
    assert outcome is not None
    logs = "".join(path.read_text() for path in (tmp_path / "out" / "logs").glob("*.log"))
    assert logs.count("0 lost, 0 double") == 1
    assert "released blocks" in logs
    assert "took over the blocks of pserver 0" in logs
    assert "values are lost" not in logs
    assert "values were lost" not in logs


def test_rollback_and_standby_pservers_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="standby pservers cannot be used with the recovery rollback"):
        fe.local(standby_pservers=1, recovery="rollback")


def test_the_number_of_standby_pservers_is_checked() -> None:
    with pytest.raises(UsageError, match="standby_pservers is -1, but must be a number, 0 or more"):
        fe.local(standby_pservers=-1)
