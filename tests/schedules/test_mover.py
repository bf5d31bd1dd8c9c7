"""Every order in which blocks leave a pserver while threads discard what is left of earlier ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flightedl.domain.moving.server import State
from flightedl.domain.moving.values import Release
from flightedl.pserver.moving import mover
from flightedl.pserver.moving.mover import Mover
from tests.support.planting import bug, rewrites

from .scheduler import Run, VirtualClock, explore, finds


class Rows:
    """Rows of buckets that have left."""

    def __init__(self) -> None:
        self.left = 0

    @property
    def has_leftovers(self) -> bool:
        return self.left > 0

    def discard_some(self) -> None:
        self.left -= 1


def releasing(run: Run) -> None:
    """Rows of every released bucket are discarded, however late they are released."""
    rows, clock = Rows(), VirtualClock()

    def drop(_numbers: range) -> None:
        rows.left += 1

    shard: Any = SimpleNamespace(rows=rows, drop=drop, thaw=lambda _: None)
    nothing: Any = None
    moves = Mover(0, 1, State((0, 1)), shard, nothing, clock, nothing, nothing)  # type: ignore[arg-type]
    reading: Any = SimpleNamespace(placement=SimpleNamespace(version=1))

    def release() -> None:
        for block in (0, 1):
            with moves._changed:
                moves._carry_out(Release(block), reading)
            run.sleep(mover._DISCARD_PAUSE_S)

    run.threads(release)
    run.sleep(10.0)
    assert not moves.is_discarding, "rows that another pserver has now stay in memory"


def test_all_rows_that_have_left_are_discarded() -> None:
    assert explore(releasing, [mover], deviations=2).is_complete


def test_rows_that_stay_are_found() -> None:
    flaw = bug(
        "a thread that is about to end is taken for one that goes on",
        rewrites(
            "pserver.moving.mover:Mover._discard",
            "with self._changed:\n                if not self.is_discarding or self._is_closed:",
            """
            is_over = not self.is_discarding or self._is_closed
            with self._changed:
                if is_over:
            """,
        ),
    )
    finds(flaw, releasing, [mover], deviations=2)
