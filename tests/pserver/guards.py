"""Checks that the product's modules hold the lock that a method requires of its caller.

Objects such as spans, tables, cuts and cores have no lock of their own: "the caller must hold the span's lock". A call
without it does harm only if another thread comes in between, which hardly any test provokes. So every call that a
driver makes during the tests of pservers is checked. Calls that tests make themselves are not.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.feed.consumers import Consumers
from flightedl.domain.feed.server import ServerFeed
from flightedl.domain.moving.server import MovingBlocks
from flightedl.domain.moving.standby import StandbyCopy
from flightedl.domain.pserver.blocks import BlockProtocol
from flightedl.domain.pserver.life import PserverLife
from flightedl.pserver.cuts.kept import RequestedCuts
from flightedl.pserver.cuts.snapshots import Snapshots
from flightedl.pserver.moving.mover import Mover
from flightedl.pserver.moving.standby import Standby
from flightedl.pserver.readers.consumers import ConsumerPositions
from flightedl.pserver.readers.feed import PserverFeed
from flightedl.pserver.service import PserverService
from flightedl.pserver.stores.array_span import ArraySpan
from flightedl.pserver.stores.held import Held
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.rowstore.cut import RowCut
from flightedl.rowstore.tables import RowTables

#: Modules whose calls are checked. The others call only what belongs to them, under the lock of their callers.
_DRIVERS = {
    f"flightedl.pserver.{name}"
    for name in (
        *("consumers", "copying", "feed", "held", "kept", "service", "shard", "snapshots"),
        *("moving.arrival", "moving.copies", "moving.departure", "moving.mover", "moving.standby"),
        "rows.store",
    )
}
_Lock = Any

#: Methods by class that require the lock of the object's span.
_UNDER_THE_SPANS_LOCK: dict[type, str] = {
    ArraySpan: "borrow piece detach_for_write parts get_ready carry_out cut",
    RowSpan: "piece parts get_ready carry_out cut begin_cut",
    RowTables: "begin_cut keep_cut begin_again begin_feed_cut begin_copy end_copy changed_count release state_of take "
    "discard counts charge",
    RowCut: "next_rows drop",
}
#: Methods of the protocol that require the lock under which it decides.
_DECIDING = (
    "split join initialize prepare push apply_view begin_cut copy end_cut drop_cut release unadoptable adopt state_of "
    "applied set_task_counts"
)
#: Core -> its methods that require a lock.
_CORES: dict[type, str] = {
    PserverSnapshots: "take taken written failed is_current",
    ServerFeed: "note mark position changed_after removed_after unchanged_after",
    PserverLife: "apply observe_master check_request",
    Consumers: "acknowledged answered take",
    MovingBlocks: "read received updated freeze give_up",
    StandbyCopy: "begin overwrite end fail is_usable",
}
#: Driver -> its attribute with the lock that guards its core.
_LOCKS = {
    ConsumerPositions: "_lock",
    Mover: "_changed",
    PserverFeed: "_lock",
    PserverService: "_lock",
    RequestedCuts: "_lock",
    Snapshots: "_lock",
    Standby: "_lock",
}


#: Attribute by which tables, cuts and protocols refer to their lock during a test.
_LOCK_OF = "_lock_for_tests"


class Guards:
    """Calls during a test that lacked their lock."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    @staticmethod
    def of_span(one: Any, _: FrameType) -> _Lock | None:
        """Return the lock of an object; None if no driver can reach the object yet."""
        return one.lock if isinstance(one, ArraySpan | RowSpan) else getattr(one, _LOCK_OF, None)

    @staticmethod
    def of_driver(_: object, caller: FrameType) -> _Lock | None:
        """Return the lock of the driver that calls its core; None if something else calls it."""
        driver = caller.f_locals.get("self")
        name = _LOCKS.get(type(driver))
        return None if name is None else getattr(driver, name)

    def checked(self, function: Callable[..., Any], find: Callable[[Any, FrameType], _Lock | None]) -> Any:
        @functools.wraps(function)
        def call(one: Any, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if (
                caller.f_globals["__name__"] in _DRIVERS
                and (lock := find(one, caller)) is not None
                and not _is_held(lock)
            ):
                place = f"{caller.f_code.co_qualname}, line {caller.f_lineno}"
                self.violations.append(f"{place} calls {function.__qualname__} without the lock")
            return function(one, *args, **kwargs)

        return call

    def check(self, patch: pytest.MonkeyPatch, kind: type, names: str, find: Any) -> None:
        for name in names.split():
            patch.setattr(kind, name, self.checked(getattr(kind, name), find))


def _is_held(lock: _Lock) -> bool:
    return lock._is_owned() if isinstance(lock, threading.Condition) else lock.locked()


def _after(patch: pytest.MonkeyPatch, kind: type, name: str, then: Callable[..., None]) -> None:
    """Call ``then`` with the arguments of a method, after each call."""
    function = getattr(kind, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        then(*args)
        return result

    patch.setattr(kind, name, call)


def install(patch: pytest.MonkeyPatch) -> Guards:
    """Check the calls of all objects that are made from now on."""
    guards = Guards()

    def of_rows(span: Any, *_: object) -> None:
        setattr(span.rows, _LOCK_OF, span.lock)

    def of_held(held: Any, *_: object) -> None:
        setattr(held.protocol, _LOCK_OF, held.deciding)

    def of_cut(rows: Any, cut: Any, **_: object) -> None:
        setattr(cut, _LOCK_OF, getattr(rows, _LOCK_OF, None))

    _after(patch, RowSpan, "__init__", of_rows)
    _after(patch, Held, "__init__", of_held)
    _after(patch, RowTables, "_begin", of_cut)
    for kind, names in _UNDER_THE_SPANS_LOCK.items():
        guards.check(patch, kind, names, guards.of_span)
    guards.check(patch, BlockProtocol, _DECIDING, guards.of_span)
    for kind, names in _CORES.items():
        guards.check(patch, kind, names, guards.of_driver)
    return guards
