"""Strikes on a cluster's processes: when they are due, whom they meet, and that no process stays frozen."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.errors import UnavailableError
from flightedl.launch.policy import Role, Slot
from flightedl.launch.strikes import Strike, Striker


class Cluster:
    """A cluster of three trainers, whose signals are remembered."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, signal.Signals]] = []
        #: Numbers of trainers that are being replaced.
        self.gone: set[int] = set()

    @property
    def processes(self) -> list[Any]:
        slots = [Slot(Role.TRAINER, number) for number in range(3)]
        return [SimpleNamespace(slot=slot, pid=None if slot.index in self.gone else 100 + slot.index) for slot in slots]

    def kill(self, _role: Role, index: int, number: signal.Signals) -> int:
        if index in self.gone:
            raise UnavailableError("it is being replaced")
        self.sent.append((index, number))
        return 100 + index


def striker(cluster: Any, *strikes: Strike) -> Striker:
    def plan() -> Iterator[Strike]:
        yield from strikes
        while True:
            yield Strike(1000.0, Role.TRAINER, 0.0)

    return Striker(cluster, plan())


def kill(after_s: float, which: float = 0.0) -> Strike:
    return Strike(after_s, Role.TRAINER, which)


def freeze(after_s: float, for_s: float, which: float = 0.0) -> Strike:
    return Strike(after_s, Role.TRAINER, which, for_s)


def test_strikes_happen_when_they_are_due() -> None:
    cluster = Cluster()
    made = striker(cluster, kill(2.0), kill(0.0, 0.5), kill(3.0, 0.99))
    was_started = made.is_started
    assert [*made.strike(10.0)] == []
    assert (was_started, made.is_started) == (False, True)
    assert [*made.strike(11.9)] == []
    assert [*made.strike(12.0)] == ["killed trainer-0 (pid 100)", "killed trainer-1 (pid 101)"]
    assert [*made.strike(14.9)] == []
    assert len([*made.strike(60.0)]) == 1
    assert cluster.sent == [(0, signal.SIGKILL), (1, signal.SIGKILL), (2, signal.SIGKILL)]
    assert made.done == {"kill trainer": 3}


def test_a_frozen_process_is_not_struck_and_continues_in_time() -> None:
    cluster = Cluster()
    made = striker(cluster, freeze(0.0, 5.0), kill(1.0))
    assert [*made.strike(0.0)] == ["froze trainer-0 (pid 100) for 5.0 s"]
    assert [*made.strike(1.0)] == ["killed trainer-1 (pid 101)"]
    assert [*made.strike(4.9)] == []
    assert [*made.strike(5.0)] == ["let TRAINER 0 continue".replace("TRAINER", str(Role.TRAINER))]
    assert [*made.strike(6.0)] == []
    assert cluster.sent == [(0, signal.SIGSTOP), (1, signal.SIGKILL), (0, signal.SIGCONT)]


def test_all_frozen_processes_continue_at_the_end() -> None:
    cluster = Cluster()
    made = striker(cluster, freeze(0.0, 50.0), freeze(0.0, 60.0))
    assert len([*made.strike(0.0)]) == 2
    cluster.gone.add(0)
    made.end()
    made.end()
    assert cluster.sent[2:] == [(1, signal.SIGCONT)]


@pytest.mark.parametrize("gone", [{0, 1, 2}, {0}])
def test_processes_that_are_being_replaced_are_not_struck(gone: set[int]) -> None:
    cluster = Cluster()
    cluster.gone = gone
    made = striker(cluster, kill(0.0))
    assert [*made.strike(0.0)] == ([] if len(gone) == 3 else ["killed trainer-1 (pid 101)"])
    assert sum(made.done.values()) == len(cluster.sent)
