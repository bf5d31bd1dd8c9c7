"""Every order in which pushes split spans while other threads wait for their locks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flightedl.domain.consistency.modes import Async
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.pserver.stores import held
from flightedl.pserver.stores.held import Held
from flightedl.pserver.stores.interface import Store
from tests.pserver.test_snapshots import Pserver
from tests.support.memory import MemoryStorage
from tests.support.planting import bug, rewrites

from .scheduler import Run, explore, finds, first_failure

SPECS = [ParameterSpec("w", (2,)), ParameterSpec("b", (3,))]


def splitting(run: Run) -> None:
    """Each block gets every batch that is pushed to it, although a push of one block splits their span."""
    pserver = Pserver(MemoryStorage(), Async(), specs=SPECS, momentum=0.0)
    outcomes: list[int] = []

    def push(batch: int, places: range) -> None:
        outcomes.extend(piece.outcome for piece in pserver.push_some(batch, places))

    def look() -> None:
        with pserver.shard._held.locked(pserver.shard.dense, 1) as span:
            assert span is pserver.shard.dense.span(1), "a span that was split is used"

    run.threads(lambda: push(0, range(2)), lambda: push(1, range(1, 2)), look)
    assert set(outcomes) == {outcomes[0]}
    sums = [float(block.values.sum()) for block in pserver.shard.blocks()]
    assert sums == [-2.0, -6.0], "a gradient is lost, or was applied twice"
    assert [block.rounds.version for block in pserver.shard.blocks()] == [1, 2]
    assert all(np.isfinite(block.values).all() for block in pserver.shard.blocks())


def test_no_gradient_is_lost_when_a_span_is_split() -> None:
    assert explore(splitting, [held]).is_complete


def test_a_split_span_that_is_used_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    flaw = bug(
        "a push goes to a span that was split",
        rewrites("pserver.shard:Shard._push", "if span.is_split:\n                return None", "pass"),
    )
    finds(flaw, splitting, [held])

    @contextlib.contextmanager
    def locked(_: Held, store: Store[Any], number: int) -> Iterator[Any]:
        span = store.span(number)
        with span.lock:
            yield span

    monkeypatch.setattr(Held, "locked", locked)
    assert first_failure(splitting, [held]).error is not None
