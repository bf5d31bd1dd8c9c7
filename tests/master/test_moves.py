"""Transactions of moves change only the intent that the master knows."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keeper import HeldKey
from flightedl.domain.master.effects import StoreMoves
from flightedl.domain.master.events import MovesRead
from flightedl.domain.moving.values import Intent, Move, StoredIntent, Transaction
from flightedl.master.moves import MoveTransactions
from flightedl.messages.base import decode, encode
from flightedl.ports import Delete
from flightedl.testing.contracts.coordinator import put
from flightedl.testing.memory import MemoryCoordinator

from .job_of_twins import KEYS

OURS = Intent(1, (Move(0, 0, 1),), ((0, 5), (1, 6)))
THEIRS = Intent(2, (Move(1, 1, 0),), ((0, 5), (1, 6)))


@pytest.mark.parametrize("intent", [None, OURS], ids=["deleted", "replaced"])
def test_an_intent_of_another_attempt_is_not_changed(intent: Intent | None) -> None:
    clock, outcomes = SystemClock(), queue.SimpleQueue[MovesRead]()
    coordinator = MemoryCoordinator(clock)
    held = HeldKey.claim(coordinator, clock, KEYS.master_lock, b"", 20.0)
    assert held is not None
    known = put(coordinator, KEYS.moving, encode(OURS))
    coordinator.transact([], [Delete(KEYS.moving)])
    present = put(coordinator, KEYS.moving, encode(THEIRS))
    state: Any = SimpleNamespace(becomes_durable=lambda *_: True, apply=outcomes.put, clock=clock)
    moves = MoveTransactions(state, held, coordinator, KEYS, 0, lambda _: None)
    moves.do(StoreMoves(Transaction(known, intent), 1))
    outcome = outcomes.get(timeout=20)
    moves.close()
    held.release()
    assert outcome.stored == StoredIntent(present, THEIRS)
    entry = coordinator.get(KEYS.moving)
    assert entry is not None
    assert (entry.create_revision, decode(entry.value, Intent)) == (present, THEIRS)
