"""Every order in which two spans move their values in one arena while a reader still has both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flightedl.client.model import lending
from flightedl.client.model.lending import Lending
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.sharding import Block
from flightedl.errors import UsageError
from flightedl.pserver.stores import arena as arenas
from flightedl.pserver.stores.arena import Arena
from flightedl.pserver.stores.array_span import ArraySpan
from tests.support.planting import Planted, bug, rewrites, swaps

from .scheduler import Lock, Run, explore, finds, running


@pytest.fixture(autouse=True)
def copies_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy values in two parts, between which other threads may run, as they may during a large copy."""

    def copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
        half = source.size // 2
        target[:half] = source[:half]
        running().point()
        target[half:] = source[half:]

    monkeypatch.setattr(arenas, "copy_past_cache", copy)


def span_of(arena: Arena, number: int) -> ArraySpan:
    values = arena.allocate(2, np.float32, 100.0 * number, is_values=True)
    place = Block(number, 0, 0, 2, 0)
    lock: Any = Lock()
    unused: Any = SimpleNamespace(optimizer=SGD(1.0))
    return ArraySpan(range(number, number + 1), [place], values, [], unused, unused, arena, lock)


def moving(run: Run) -> None:
    """A borrowed view never changes, and no update is lost, while two spans of one size are updated."""
    arena = Arena()
    both = [span_of(arena, 0), span_of(arena, 1)]
    lent = [span.borrow(span.numbers) for span in both]

    def update(span: ArraySpan) -> None:
        with span.lock:
            values = span.detach_for_write()
            values[0] += 1
            run.point()
            values[1] += 1

    def read() -> None:
        for number in (0, 1):
            assert lent[0].tolist() == [100.0 * number] * 2, "values changed while they were lent"
            run.point()
            del lent[0]

    run.threads(lambda: update(both[0]), lambda: update(both[1]), read)
    assert [span.values.tolist() for span in both] == [[1.0, 1.0], [101.0, 101.0]]


def test_lent_values_never_change_and_no_update_is_lost() -> None:
    assert explore(moving, [arenas]).is_complete


@pytest.mark.parametrize(
    "flaw",
    [
        bug(
            "memory is given to others before its values are copied",
            rewrites(
                "pserver.stores.arena:Arena.move",
                "copy_past_cache(target.view(np.uint8), values.view(np.uint8))",
                """
                with self._lock:
                    self._left.append((values, readers))
                copy_past_cache(target.view(np.uint8), values.view(np.uint8))
                """,
            ),
        ),
        bug(
            "memory is reused while one of its readers is alive",
            swaps("pserver.stores.arena:Arena._values_of", "all(reader() is None for reader in readers)", "True"),
        ),
        bug(
            "memory is chosen without the lock",
            swaps(
                "pserver.stores.arena:Arena.move",
                "with self._lock:\n            target",
                "if True:\n            target",
            ),
        ),
        bug(
            "values are updated in place although a reader is alive",
            swaps("pserver.stores.array_span:ArraySpan.detach_for_write", "lent() is not None:", "lent() is None:"),
        ),
    ],
    ids=lambda flaw: flaw.what,
)
def test_values_that_change_while_they_are_read_are_found(flaw: Planted) -> None:
    finds(flaw, moving, [arenas])


def showing(run: Run) -> None:
    """The user's function sees one piece at a time, and the first error is raised once, after all threads are done."""
    shown: list[str] = []
    at_once = 0

    def show(name: str, _start: int, values: object) -> None:
        nonlocal at_once
        at_once += 1
        run.point()
        assert at_once == 1, "two pieces are shown at the same time"
        at_once -= 1
        shown.append(name)
        if name == "b":
            kept.append(values)

    kept: list[object] = []
    lent = Lending(show)
    data = memoryview(bytes(8))
    run.threads(*(lambda name=name: lent.show(name, 0, data, np.dtype(np.float32)) for name in "ab"))
    with pytest.raises(UsageError, match="'b' were kept"):
        lent.require()
    lent.require()
    assert shown in (["a", "b"], ["b"]), "a piece was shown after an error"


def test_pieces_are_shown_one_at_a_time() -> None:
    assert explore(showing, [lending], deviations=3).is_complete


def test_two_pieces_at_a_time_are_found() -> None:
    flaw = bug("no lock", swaps("client.model.lending:Lending.show", "with self._lock:", "if True:"))
    finds(flaw, showing, [lending])
