"""Orders of snapshots: repeated until they are answered, and only if checkpoints are kept."""

from __future__ import annotations

import pytest

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.values import CheckpointSettings, OrderSnapshot
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.effects import Outbox
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest

ORDER = OrderNumber(5, 1, 1)


def checkpointing(*, is_kept: bool = True) -> Checkpointing:
    made = Checkpoints(CheckpointSettings(interval_s=None), 5, 1, 0.0)
    return Checkpointing(made, is_kept=is_kept, outbox=Outbox())


def ordered() -> Checkpointing:
    made = checkpointing()
    made.perform([OrderSnapshot(0, 10, SnapshotRequest(ORDER, None, "c-1/x", plan_hash=""))])
    return made


def test_only_the_addressed_process_gets_an_order() -> None:
    made = ordered()
    order = made.order_for(0, 10, "p")
    assert order is not None
    assert (order.order.number, order.name) == (1, "c-1/x")
    assert made.order_for(0, 11, "p") is None
    assert made.order_for(1, 10, "p") is None
    made.down(0, 1.0)
    assert made.order_for(0, 10, "p") is None


@pytest.mark.parametrize(
    ("generation", "order", "state", "is_over"),
    [
        (10, ORDER, "written", True),
        (10, ORDER, "failed", True),
        (10, ORDER, "refused", True),
        (10, ORDER, "taken", False),
        (10, ORDER, "waiting", False),
        (10, OrderNumber(5, 1, 0), "written", False),
        (11, ORDER, "written", False),
    ],
)
def test_an_order_is_repeated_until_it_is_answered(generation, order, state, is_over) -> None:
    made = ordered()
    made.answered(0, generation, SnapshotReply(order, state), 1.0)
    assert (made.order_for(0, 10, "p") is None) == is_over
    made.answered(3, 10, SnapshotReply(ORDER, "written"), 1.0)  # From a pserver without an order.


def test_without_checkpoints_nothing_is_ordered() -> None:
    for is_kept in (True, False):
        made = checkpointing(is_kept=is_kept)
        assert (made.age_s(7.0) is None) != is_kept
        made.settled(0, 10, 0.0)
        made.tick(1.0, None)
        assert (made.order_for(0, 10, "p") is not None) == is_kept
