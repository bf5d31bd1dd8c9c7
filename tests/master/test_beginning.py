"""Pservers that lack their values, as the master knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keeper import HeldKey
from flightedl.domain.master.effects import DeleteElection, Outbox
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.recovery.reinitialization import Reinitialize
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.errors import FencedError, NotReadyError
from flightedl.master.beginning import delete_election
from flightedl.messages.control import AppliedReply
from flightedl.ports import Delete
from tests.support.contracts.coordinator import put
from tests.support.memory import MemoryCoordinator

from .job_of_twins import KEYS, Job

HAS_NOTHING = AppliedReply(summary=AppliedSummary().encode())


def pservers(present: dict[int, int], *settled: int) -> Pservers:
    """Two pservers, with these live processes; those in ``settled`` have announced their applied batches."""
    known = Pservers(2, "replay", None, Outbox())
    look(known, present)
    for index in settled:
        known.answered(index, present[index], None, HAS_NOTHING, None)
    return known


def look(known: Pservers, present: dict[int, int]) -> None:
    known.present = present
    for index, generation in present.items():
        known.seen(index, generation)


def test_pservers_with_values_end_before_the_election_does() -> None:
    known = pservers({0: 4, 1: 5}, 0, 1)
    look(known, {0: 7, 1: 5})
    assert known.lacks(0, 7, 3, may_be_saved=False) is None
    assert not known.must_end(0, 7)
    assert known.must_end(1, 5)
    assert "pserver 0" in known.waiting_for
    look(known, {0: 7, 1: 9})
    assert not known.must_end(1, 9)
    assert known.lacks(1, 9, 3, may_be_saved=False) == Reinitialize(3, {0: 7, 1: 9})
    assert not known.is_settled(0, 7)
    assert not known.is_settled(1, 9)


def test_no_pserver_ends_if_a_checkpoint_is_found() -> None:
    known = pservers({0: 7, 1: 5}, 1)
    known.lacks(0, 7, 3, may_be_saved=False)
    assert known.must_end(1, 5)
    known.answered(0, 7, None, HAS_NOTHING, None)
    assert not known.must_end(1, 5)
    assert not known.waiting_for


def test_the_report_of_an_ended_process_is_forgotten() -> None:
    known = pservers({0: 8, 1: 5}, 1)
    known.lacks(0, 7, 3, may_be_saved=False)
    assert not known.waiting_for
    assert not known.must_end(1, 5)


class Etcd:
    """A master's lock, two pservers, and an election."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.coordinator = MemoryCoordinator(clock)
        held = HeldKey.claim(self.coordinator, clock, KEYS.master_lock, b"", 20.0)
        assert held is not None
        self.held = held
        generations = {index: put(self.coordinator, KEYS.pserver(index), b"") for index in range(2)}
        self.step = Reinitialize(put(self.coordinator, KEYS.init_params, b""), generations)

    @property
    def has_election(self) -> bool:
        delete_election(self.held, KEYS, self.step)
        return self.coordinator.get(KEYS.init_params) is not None

    def replace(self, key: str) -> None:
        self.coordinator.transact([], [Delete(key)])
        put(self.coordinator, key, b"")


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    made = Etcd()
    yield made
    made.held.release()


def test_the_election_of_lost_values_is_deleted(etcd: Etcd) -> None:
    assert not etcd.has_election


@pytest.mark.parametrize("key", [KEYS.init_params, KEYS.pserver(0), KEYS.pserver(1)])
def test_an_election_whose_values_may_exist_is_kept(etcd: Etcd, key: str) -> None:
    etcd.replace(key)
    assert etcd.has_election


def test_a_deposed_master_deletes_no_election(etcd: Etcd) -> None:
    etcd.replace(KEYS.master_lock)
    with pytest.raises(FencedError):
        delete_election(etcd.held, KEYS, etcd.step)
    assert etcd.coordinator.get(KEYS.init_params) is not None


def test_an_election_is_deleted_after_the_state_that_led_to_it_is_stored(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    master = job.start_master()
    pserver = job.start_pserver(0)
    election = put(job.coordinator, KEYS.init_params, b"")
    step = DeleteElection(Reinitialize(election, {0: pserver.generation}), 7)

    def not_yet(revision: int) -> None:
        assert revision == 7
        raise NotReadyError("etcd is slow")

    monkeypatch.setattr(master.state, "wait_durable", not_yet)
    with pytest.raises(NotReadyError):
        master.service._carry(step)
    assert job.coordinator.get(KEYS.init_params) is not None
    monkeypatch.undo()
    master.service._carry(DeleteElection(step.step, 0))
    assert job.coordinator.get(KEYS.init_params) is None
