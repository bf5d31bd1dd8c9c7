"""Transactions of moves change only the state that the master knows, and their outcome is always learned."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keeper import HeldKey
from flightedl.domain.master.effects import StoreMoves
from flightedl.domain.master.events import MovesRead
from flightedl.domain.moving.values import NONE, Intent, Move, StoredIntent, Transaction
from flightedl.master.moves import MoveTransactions
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import Placement
from flightedl.ports import Delete, Put
from tests.support.contracts.coordinator import put
from tests.support.memory import MemoryCoordinator

from .job_of_twins import KEYS

OURS = Intent(1, (Move(0, 0, 1),), ((0, 5), (1, 6)))
THEIRS = Intent(2, (Move(1, 1, 0),), ((0, 5), (1, 6)))
BEFORE = Placement(version=1, pservers=2, blocks=((0, 2),))
AFTER = Placement(version=2, pservers=2, blocks=((1, 1), (0, 1)))
LATER = Placement(version=3, pservers=2, blocks=((1, 2),))


class Moves:
    """The transactions of a master that knows no placement and no checkpoint."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.outcomes = queue.SimpleQueue[MovesRead | str]()
        self.coordinator = MemoryCoordinator(clock)
        held = HeldKey.claim(self.coordinator, clock, KEYS.master_lock, b"", 20.0)
        assert held is not None
        self.held = held
        self.is_durable = True
        self.durable: list[int] = []
        state: Any = SimpleNamespace(
            becomes_durable=self._becomes_durable, apply=self.outcomes.put, clock=clock, stored_at=lambda _: 0
        )
        self.moves = MoveTransactions(state, held, self.coordinator, KEYS, 0, self.outcomes.put)

    def _becomes_durable(self, _is_ending: object, revision: int) -> bool:
        self.durable.append(revision)
        return self.is_durable

    def outcome(self, transaction: Transaction) -> MovesRead:
        self.moves.do(StoreMoves(transaction, 1))
        found = self.outcomes.get(timeout=20)
        assert isinstance(found, MovesRead), found
        assert found.is_outcome
        return found

    def stored(self) -> tuple[Placement | None, StoredIntent | None]:
        placed, moving = self.coordinator.get(KEYS.placement), self.coordinator.get(KEYS.moving)
        return (
            None if placed is None else decode(placed.value, Placement),
            None if moving is None else StoredIntent(moving.create_revision, decode(moving.value, Intent)),
        )


@pytest.fixture
def moves() -> Iterator[Moves]:
    made = Moves()
    yield made
    made.moves.close()
    made.held.release()


@pytest.mark.parametrize("intent", [None, OURS], ids=["deleted", "replaced"])
def test_an_intent_of_another_attempt_is_not_changed(moves: Moves, intent: Intent | None) -> None:
    known = put(moves.coordinator, KEYS.moving, encode(OURS))
    moves.coordinator.transact([], [Delete(KEYS.moving)])
    present = put(moves.coordinator, KEYS.moving, encode(THEIRS))
    outcome = moves.outcome(Transaction(known, intent))
    assert outcome.stored == StoredIntent(present, THEIRS)
    assert moves.stored() == (None, StoredIntent(present, THEIRS))


def test_an_intent_is_stored_only_if_there_is_none(moves: Moves) -> None:
    first = moves.outcome(Transaction(NONE, OURS))
    assert first.stored == moves.stored()[1]
    again = moves.outcome(Transaction(NONE, THEIRS))
    assert again.stored == first.stored == moves.stored()[1]


def test_a_placement_of_another_master_is_not_replaced_before_it_is_known(moves: Moves) -> None:
    put(moves.coordinator, KEYS.placement, encode(BEFORE))
    assert moves.outcome(Transaction(NONE, None, AFTER)).placement == BEFORE
    assert moves.outcome(Transaction(NONE, None, AFTER)).placement == AFTER
    assert moves.outcome(Transaction(NONE, None, LATER)).placement == LATER
    assert moves.stored() == (LATER, None)


def test_a_unit_is_committed_under_the_attempt_of_its_intent(moves: Moves) -> None:
    generations = tuple((index, put(moves.coordinator, KEYS.pserver(index), b"")) for index in range(2))
    begun = moves.outcome(Transaction(NONE, OURS, generations=generations)).stored
    assert begun is not None
    rest = moves.outcome(Transaction(begun.attempt, THEIRS, AFTER, generations=generations))
    assert (rest.placement, rest.stored) == moves.stored() == (AFTER, StoredIntent(begun.attempt, THEIRS))
    moves.coordinator.transact([], [Delete(KEYS.pserver(1))])
    put(moves.coordinator, KEYS.pserver(1), b"")
    refused = moves.outcome(Transaction(begun.attempt, None, LATER, generations=generations))
    assert (refused.placement, refused.stored) == moves.stored() == (AFTER, StoredIntent(begun.attempt, THEIRS))
    ended = moves.outcome(Transaction(begun.attempt, None))
    assert (ended.placement, ended.stored, moves.stored()) == (None, None, (AFTER, None))


def test_blocks_do_not_begin_to_move_after_a_checkpoint_of_another_master(moves: Moves) -> None:
    put(moves.coordinator, KEYS.checkpoint_latest, b"{}")
    assert moves.outcome(Transaction(NONE, OURS, excludes_checkpoint=True)).stored is None
    assert moves.stored() == (None, None)


@pytest.mark.parametrize("fault", ["unavailable", "lost_request", "lost_reply"])
def test_the_outcome_of_a_transaction_is_learned_although_requests_fail(moves: Moves, fault: Any) -> None:
    moves.coordinator.fail_next(fault)
    outcome = moves.outcome(Transaction(NONE, OURS))
    assert outcome.stored == moves.stored()[1]
    assert outcome.stored is not None


def test_a_transaction_waits_until_the_state_that_led_to_it_is_stored(moves: Moves) -> None:
    moves.is_durable = False
    moves.moves.do(StoreMoves(Transaction(NONE, OURS), 7))
    moves.moves._thread.join(20)
    assert moves.durable == [7]
    assert moves.stored() == (None, None)


def test_a_master_without_the_lock_stores_nothing_and_steps_down(moves: Moves) -> None:
    moves.coordinator.transact([], [Delete(KEYS.master_lock)])
    moves.coordinator.transact([], [Put(KEYS.master_lock, b"")])
    moves.moves.do(StoreMoves(Transaction(NONE, OURS), 1))
    assert moves.outcomes.get(timeout=20) == "another master holds the lock"
    assert moves.stored() == (None, None)
