"""What named consumers acknowledge is stored under their leases, and never delays an answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.messages.base import decode, encode
from flightedl.messages.feed import Acknowledgement, ChangesTicket, Position
from flightedl.ports import Put
from flightedl.pserver.readers import consumers as of_pserver
from flightedl.pserver.readers.consumers import _TOGETHER, ConsumerPositions
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
KEY = KEYS.acknowledgement("serving", 0)


def at(number: int, generation: int = 5) -> Position:
    return Position(life=3, generation=generation, placement=0, number=number)


class World:
    """A pserver's store of acknowledgements, and a consumer that holds its name."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.etcd = MemoryCoordinator(clock)
        self.of_pserver = self.etcd.another()
        self.directory = Directory(self.etcd.another(), KEYS, clock).start()
        held = HeldKey.claim(self.etcd, clock, KEYS.consumer("serving"), b'{"address": ""}', 5.0)
        assert held is not None
        self.held = held
        assert self.directory.wait_until(lambda d: d.consumers() or None, 5.0)
        self.positions = ConsumerPositions(self.of_pserver, self.directory, KEYS, clock)
        self.positions.start(0)

    def acknowledge(self, number: int) -> None:
        ticket = ChangesTicket(plan_hash="p", consumer="serving", consumer_generation=self.held.generation)
        self.positions.acknowledged(ticket, at(number), number)

    @property
    def stored(self) -> Position | None:
        entry = self.etcd.get(KEY)
        return None if entry is None else decode(entry.value, Acknowledgement).position

    def close(self) -> None:
        self.positions.close()
        self.held.release()
        self.directory.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(of_pserver, "_PAUSE_S", 0.01)
    made = World()
    yield made
    made.close()


def test_a_position_is_stored_as_long_as_its_consumer_lives(world: World) -> None:
    for number in (4, 6):
        world.acknowledge(number)
        eventually(lambda number=number: world.stored == at(number))
    entry = world.etcd.get(KEY)
    assert entry is not None
    assert entry.lease_id == world.held.lease_id
    world.held.release()
    assert world.stored is None
    world.acknowledge(7)
    world.positions.close()
    world.positions._thread.join(5.0)  # type: ignore[union-attr]
    assert world.stored is None


@pytest.mark.parametrize(("former", "expected"), [(at(90, 4), at(7)), (at(3, 6), at(3, 6))], ids=["older", "newer"])
def test_a_position_of_the_pservers_other_process_is_replaced_if_it_is_older(
    world: World, former: Position, expected: Position
) -> None:
    world.etcd.transact([], [Put(KEY, encode(Acknowledgement(position=former)), world.held.lease_id)])
    tried: list[Any] = []
    transact = world.of_pserver.transact

    def counted(*arguments: Any) -> Any:
        tried.append(arguments)
        return transact(*arguments)

    world.of_pserver.transact = counted  # type: ignore[method-assign]
    for count in range(3):
        world.acknowledge(5 + count)
        eventually(lambda count=count: len(tried) > count)
    eventually(lambda: world.stored == expected)


def test_a_write_that_fails_is_dropped_and_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.of_pserver.disconnect()
    with caplog.at_level(logging.WARNING):
        for number in (4, 5):
            world.acknowledge(number)
            eventually(lambda: not world.positions._is_needed.is_set())
    eventually(lambda: "the position of consumer serving could not be stored" in caplog.text)
    world.of_pserver.reconnect()
    world.acknowledge(6)
    eventually(lambda: world.stored == at(6))
    assert caplog.text.count("could not be stored") == 1


def test_an_acknowledgement_does_not_wait_for_etcd(world: World) -> None:
    begun, going_on = threading.Event(), threading.Event()
    transact = world.of_pserver.transact

    def blocked(*arguments: Any) -> Any:
        begun.set()
        assert going_on.wait(20.0)
        return transact(*arguments)

    world.of_pserver.transact = blocked  # type: ignore[method-assign]
    world.acknowledge(4)
    assert begun.wait(5.0)
    world.acknowledge(5)
    assert world.stored is None
    going_on.set()
    eventually(lambda: world.stored == at(5))


@pytest.mark.parametrize("generation", [0, 1 << 62], ids=["older", "newer"])
def test_only_the_holder_of_a_name_acknowledges_under_it(world: World, generation: int) -> None:
    ticket = ChangesTicket(plan_hash="p", consumer="serving", consumer_generation=generation)
    for number in (4, 5):
        world.acknowledge(number)
        world.positions.acknowledged(ticket, at(9), 9)
        world.positions.answered(ticket, 9, 1.0)
        eventually(lambda number=number: world.stored == at(number))
    for each in range(1000):
        stranger = ChangesTicket(plan_hash="p", consumer=f"name-{each}", consumer_generation=generation)
        world.positions.acknowledged(stranger, at(9), 9)
    assert set(world.positions._consumers.known) <= {"serving"}


@pytest.fixture
def many(world: World) -> Iterator[dict[str, HeldKey]]:
    """Names that this process holds besides that of the world's consumer."""
    clock, found = SystemClock(), {}
    for number in range(_TOGETHER + 5):
        name = f"name-{number}"
        held = HeldKey.claim(world.etcd, clock, KEYS.consumer(name), b'{"address": ""}', 5.0)
        assert held is not None
        found[name] = held
    assert world.directory.wait_until(lambda d: found.keys() <= d.consumers().keys() or None, 5.0)
    yield found
    for held in found.values():
        held.release()


def acknowledge_all(world: World, names: dict[str, HeldKey], number: int) -> None:
    for name, held in names.items():
        ticket = ChangesTicket(plan_hash="p", consumer=name, consumer_generation=held.generation)
        with world.positions._lock:
            world.positions._consumers.acknowledged(name, ticket.consumer_generation, at(number), number)
    world.positions._is_needed.set()


def stored_numbers(world: World, names: dict[str, HeldKey]) -> set[int]:
    entries = [world.etcd.get(KEYS.acknowledgement(name, 0)) for name in names]
    return {-1 if entry is None else decode(entry.value, Acknowledgement).position.number for entry in entries}


def test_the_positions_of_all_consumers_are_stored_together(world: World, many: dict[str, HeldKey]) -> None:
    revisions = set()
    for number in (4, 5):
        before = world.etcd.list(KEYS.prefix).revision
        acknowledge_all(world, many, number)
        eventually(lambda number=number: stored_numbers(world, many) == {number})
        revisions.add(world.etcd.list(KEYS.prefix).revision - before)
    # The thread may take the first acknowledgements before it has seen the others.
    assert max(revisions) <= 3


@pytest.mark.parametrize("how", ["a lease has ended", "a key is newer"])
def test_a_position_that_is_refused_does_not_keep_the_others_from_being_stored(
    world: World, many: dict[str, HeldKey], how: str
) -> None:
    first = many["name-0"]
    others = {name: held for name, held in many.items() if held is not first}
    if how == "a lease has ended":
        # The pserver has not seen yet that the name is free.
        world.directory.close()
        first.release()
    else:
        newer = Acknowledgement(position=at(3, generation=6))
        world.etcd.transact([], [Put(KEYS.acknowledgement("name-0", 0), encode(newer), first.lease_id)])
    for number in (4, 5):
        acknowledge_all(world, many, number)
        eventually(lambda number=number: stored_numbers(world, others) == {number})
    entry = world.etcd.get(KEYS.acknowledgement("name-0", 0))
    expected = None if how == "a lease has ended" else at(3, generation=6)
    assert (None if entry is None else decode(entry.value, Acknowledgement).position) == expected


def test_a_position_is_not_stored_for_a_process_that_has_lost_the_name(world: World) -> None:
    """The name changes hands between the look at its holder and the write."""
    transact, tried = world.of_pserver.transact, threading.Event()

    def overtaken(*arguments: Any) -> Any:
        if not tried.is_set():
            world.held.release()
            held = HeldKey.claim(world.etcd, SystemClock(), KEYS.consumer("serving"), b'{"address": ""}', 5.0)
            assert held is not None
            world.held = held
        try:
            return transact(*arguments)
        finally:
            tried.set()

    world.of_pserver.transact = overtaken  # type: ignore[method-assign]
    world.acknowledge(4)
    assert tried.wait(5.0)
    assert world.stored is None
    assert world.directory.wait_until(
        lambda d: d.consumers()["serving"].generation == world.held.generation or None, 5.0
    )
    world.acknowledge(5)
    eventually(lambda: world.stored == at(5))


def test_a_position_has_the_time_of_the_state_that_its_answer_contained(world: World) -> None:
    clock = SystemClock()
    ticket = ChangesTicket(plan_hash="p", consumer="serving", consumer_generation=world.held.generation)
    before_s = clock.wall_time()
    # The answer was made a while after the moment whose state it contains.
    world.positions.answered(ticket, 7, clock.now() - 100.0)
    world.acknowledge(7)
    eventually(lambda: world.stored == at(7))
    entry = world.etcd.get(KEY)
    assert entry is not None
    as_of_s = decode(entry.value, Acknowledgement).as_of_s
    assert before_s - 100.5 < as_of_s < clock.wall_time() - 99.5


def test_requests_without_a_name_are_not_noted(world: World) -> None:
    world.positions.acknowledged(ChangesTicket(plan_hash="p"), at(4), 4)
    world.positions.answered(ChangesTicket(plan_hash="p"), 4, 0.0)
    assert not world.positions._consumers.known
    assert not world.positions._is_needed.is_set()
