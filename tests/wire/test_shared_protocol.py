"""Shared memory as a protocol: two messages and one death in every order, on processors that reorder accesses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest

from flightedl.process.shared_memory import SharedMemory
from flightedl.wire.shared_protocol import Loans
from tests.exploration import Explored, ViolationError, explore


class Processor(Enum):
    """Which accesses of one thread may be executed before earlier ones."""

    X86 = "a read may pass an earlier write"
    WEAK = "any access may pass any earlier one"


@dataclass(frozen=True)
class Access:
    """One step of a process. ``where`` is a word of memory, or a message."""

    kind: str
    where: str = ""
    value: int = 0

    def may_pass(self, earlier: Access, processor: Processor) -> bool:
        ordered = {"fence", "send", "receive"}
        if self.kind in ordered or earlier.kind in ordered or self.where == earlier.where:
            return False
        return processor is Processor.WEAK or (self.kind != "write" and earlier.kind == "write")


def write(where: str, value: int) -> Access:
    return Access("write", where, value)


def read(where: str, message: int) -> Access:
    return Access("read", where, message)


FENCE = Access("fence")

# The owner places both messages in the same range, which consists of two words. ``count`` waits until the reader's
# counter frees a message.
REUSING_OWNER = (
    *(write("first", 1), write("last", 1), Access("send", "1")),
    *(Access("count", "consumed"), FENCE),
    *(write("first", 2), write("last", 2), Access("send", "2")),
)
REUSING_READER = (
    *(Access("receive", "1"), read("first", 1), read("last", 1), FENCE, write("consumed", 1)),
    *(Access("receive", "2"), read("first", 2), read("last", 2), FENCE, write("consumed", 2)),
)
# The owner lends its current values, version 1. Then the stream ends, and the values are updated in place.
LENDING_OWNER = (Access("send", "1"), write("over", 1), FENCE, write("first", 2), write("last", 2))
LENDING_READER = (Access("receive", "1"), read("first", 1), read("last", 1), FENCE, read("over", 0))


@dataclass(frozen=True)
class World:
    """Both processes and their memory."""

    #: Executed accesses of the owner and of the reader, and whether each is alive.
    done: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    is_alive: tuple[bool, bool] = (True, True)
    words: tuple[tuple[str, int], ...] = (("consumed", 0), ("first", 1), ("last", 1), ("over", 0))
    #: Words that the reader has read: (word, message, value).
    found: frozenset[tuple[str, int, int]] = frozenset()
    sent: frozenset[str] = frozenset()
    #: Open messages, and those freed by the counter.
    loans: tuple[int, int] = (0, 0)

    def word(self, name: str) -> int:
        return dict(self.words)[name]


def explored(owner: tuple[Access, ...], reader: tuple[Access, ...], processor: Processor) -> Explored[World]:
    """Explore all orders, with the death of either process at any moment."""
    programs = owner, reader
    looks_at_flag = any(access.where == "over" for access in reader)

    def steps(world: World) -> Iterator[tuple[str, World]]:
        if all(world.is_alive):
            yield "death of the owner", replace(world, is_alive=(False, True))
            yield "death of the reader", replace(world, is_alive=(True, False))
        for place, program in enumerate(programs):
            if world.is_alive[place]:
                yield from steps_of(world, place, program, processor)

    def is_end(world: World) -> bool:
        finished = [len(done) == len(program) for done, program in zip(world.done, programs, strict=True)]
        return all(finished) or not all(world.is_alive)

    return explore(World(), steps, lambda world: wrong_in(world, looks_at_flag=looks_at_flag), is_end)


def steps_of(
    world: World, place: int, program: tuple[Access, ...], processor: Processor
) -> Iterator[tuple[str, World]]:
    """Yield each access that a process may execute next, with the world after it."""
    done = world.done[place]
    for number, access in enumerate(program):
        earlier = [other for at, other in enumerate(program[:number]) if at not in done]
        if number in done or not all(access.may_pass(each, processor) for each in earlier):
            continue
        if (after := executed(world, access)) is not None:
            both = [done | {number}, world.done[1 - place]]
            yield f"{place} {access}", replace(after, done=(both[place], both[1 - place]))


def wrong_in(world: World, *, looks_at_flag: bool) -> str | None:
    """Return the error if the reader uses values that do not belong to their message."""
    found = {(word, message): value for word, message, value in world.found}
    if looks_at_flag and found.get(("over", 0)) != 0:
        return None
    for message in (1, 2):
        values = [found[word, message] for word in ("first", "last") if (word, message) in found]
        if len(values) == 2 and values != [message] * 2:
            return f"the reader uses {values} as message {message}"
    return None


def executed(world: World, access: Access) -> World | None:
    """Return the world after an access, or None if it has to wait."""
    match access.kind:
        case "write":
            return replace(world, words=tuple(sorted({**dict(world.words), access.where: access.value}.items())))
        case "read":
            value = access.where, access.value, world.word(access.where)
            return replace(world, found=world.found | {value})
        case "send":
            loans = loans_of(world)
            loans.lend()
            return replace(world, sent=world.sent | {access.where}, loans=(loans.open, loans.seen))
        case "receive":
            return world if access.where in world.sent else None
        case "count":
            loans = loans_of(world)
            return replace(world, loans=(loans.open, loans.seen)) if loans.counted(world.word("consumed")) else None
    return world


def loans_of(world: World) -> Loans:
    loans = Loans()
    loans.open, loans.seen = world.loans
    return loans


def without(program: tuple[Access, ...], *left_out: int) -> tuple[Access, ...]:
    return tuple(access for number, access in enumerate(program) if number not in left_out)


def unfenced(program: tuple[Access, ...]) -> tuple[Access, ...]:
    return tuple(access for access in program if access != FENCE)


@pytest.mark.parametrize("processor", Processor)
def test_a_reader_never_uses_a_mixture(processor: Processor) -> None:
    assert len(explored(REUSING_OWNER, REUSING_READER, processor).parents) > 50
    assert len(explored(LENDING_OWNER, LENDING_READER, processor).parents) > 20


def test_x86_needs_no_fence() -> None:
    explored(unfenced(REUSING_OWNER), unfenced(REUSING_READER), Processor.X86)
    explored(unfenced(LENDING_OWNER), unfenced(LENDING_READER), Processor.X86)


@pytest.mark.parametrize(
    ("owner", "reader"),
    [
        (unfenced(REUSING_OWNER), REUSING_READER),
        (REUSING_OWNER, unfenced(REUSING_READER)),
        (unfenced(LENDING_OWNER), LENDING_READER),
        (LENDING_OWNER, unfenced(LENDING_READER)),
    ],
    ids=["before reuse", "before the counter", "after the flag is set", "before the flag is read"],
)
def test_other_processors_need_each_fence(owner: tuple[Access, ...], reader: tuple[Access, ...]) -> None:
    with pytest.raises(ViolationError, match="the reader uses"):
        explored(owner, reader, Processor.WEAK)


SENT_FIRST = (*REUSING_OWNER[:5], REUSING_OWNER[7], *REUSING_OWNER[5:7])
COUNTED_FIRST = (REUSING_READER[0], REUSING_READER[4], *REUSING_READER[1:4], *REUSING_READER[5:])
UPDATED_FIRST = (LENDING_OWNER[0], *LENDING_OWNER[3:], *LENDING_OWNER[1:3])
LOOKED_FIRST = (LENDING_READER[0], LENDING_READER[4], *LENDING_READER[1:4])


@pytest.mark.parametrize(
    ("owner", "reader"),
    [
        (without(REUSING_OWNER, 3), REUSING_READER),
        (REUSING_OWNER, COUNTED_FIRST),
        (SENT_FIRST, REUSING_READER),
        (UPDATED_FIRST, LENDING_READER),
        (LENDING_OWNER, LOOKED_FIRST),
        (LENDING_OWNER, without(LENDING_READER, 4)),
    ],
    ids=[
        "reused without a look at the counter",
        "counted before it is read",
        "sent before it is written",
        "updated before the flag is set",
        "looked at the flag before reading",
        "no look at the flag",
    ],
)
def test_a_wrong_order_is_found(owner: tuple[Access, ...], reader: tuple[Access, ...]) -> None:
    with pytest.raises(ViolationError, match="the reader uses"):
        explored(owner, reader, Processor.X86)


def test_a_wrong_counter_frees_only_what_is_open() -> None:
    loans = Loans()
    assert loans.counted(5) == 0
    loans.lend()
    loans.lend()
    assert (loans.counted(1), loans.open) == (1, 1)
    assert (loans.counted(0), loans.counted(1), loans.open) == (0, 0, 1)
    assert (loans.counted(1 << 63), loans.open) == (1, 0)
    loans.lend()
    assert (loans.answered(3), loans.open) == (1, 0)
    loans.lend()
    loans.end()
    assert (loans.open, loans.is_over) == (0, True)
    with pytest.raises(AssertionError):
        loans.lend()


class Word:
    """A word of shared memory that notes its accesses."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def __getitem__(self, _: int) -> int:
        self._log.append(f"read {self._name}")
        return 1

    def __setitem__(self, _: int, value: int) -> None:
        self._log.append(f"write {self._name}")


def test_the_memory_has_the_fences_of_the_protocol() -> None:
    log: list[str] = []
    memory: Any = SharedMemory.create(bytes(16), 4096)
    memory._fence = lambda: log.append("fence")
    memory._consumed, memory._over = Word("consumed", log), Word("over", log)

    def accesses(of: tuple[Access, ...]) -> list[str]:
        return ["fence" if access == FENCE else f"{access.kind} {access.where}" for access in of]

    assert memory.consumed == 1
    assert log == ["read consumed", "fence"]
    assert [each.replace("count", "read", 1) for each in accesses(REUSING_OWNER[3:5])] == log
    log.clear()
    memory.consumed = 2
    assert accesses(REUSING_READER[3:5]) == log
    log.clear()
    memory.end()
    assert accesses(LENDING_OWNER[1:3]) == log
    log.clear()
    assert memory.is_over
    assert accesses(LENDING_READER[3:5]) == log
