"""Pservers that lack their values, as the master knows them."""

from __future__ import annotations

from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.recovery.reinitialization import Reinitialize
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.messages.control import AppliedReply

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
