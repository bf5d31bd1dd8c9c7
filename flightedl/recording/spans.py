"""Spans of a pserver's blocks, which are followed through the records of the block protocol.

The records name a span by its first block. Splits, joins and moves change which blocks that span contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from flightedl.domain.pserver.block_values import ReleasedBlocks
from flightedl.recording.values import BEGUN

State = TypeVar("State")
#: Effects of an event, each as {class: fields}.
Effects = Sequence[Mapping[str, Any]]


def released_of(event: Any) -> dict[str, Any]:
    """Return the fields of the blocks in the argument of a recorded ``adopt``."""
    return dict(zip(ReleasedBlocks._fields, event["released"], strict=True))


class Spans(Generic[State]):
    """Spans in the order of their blocks, each with a state.

    Args:
        begin: Returns the state of blocks without history.
        copied: Copies the state of a span that is split.
    """

    def __init__(self, begin: Callable[[], State], copied: Callable[[State], State]) -> None:
        self._begin = begin
        self._copied = copied
        #: First block -> (all blocks, state).
        self._spans: dict[int, tuple[range, State]] = {}

    def __getitem__(self, first: int) -> tuple[range, State]:
        return self._spans[first]

    def all(self) -> Iterable[tuple[range, State]]:
        """Return all spans with their states."""
        return self._spans.values()

    def apply(self, name: str, event: Any, effects: Effects) -> None:
        """Apply the splits, joins and moves in a record."""
        if name == BEGUN:
            self._spans = {begin: (range(begin, end), self._begin()) for (begin, end), _ in event["extents"]}
        for each in effects:
            if "Split" in each:
                self._split(each["Split"]["span"], each["Split"]["into"])
            elif "Joined" in each:
                self._join(event["number"], *each["Joined"]["moved"])
            elif "ReleasedBlocks" in each:
                self._spans.pop(each["ReleasedBlocks"]["numbers"][0], None)
        if name == "adopt" and not effects:
            begin, end = released_of(event)["numbers"]
            self._spans[begin] = range(begin, end), self._begin()

    def _split(self, first: int, into: Iterable[tuple[int, int]]) -> None:
        _, state = self._spans.pop(first)
        for begin, end in into:
            self._spans[begin] = range(begin, end), self._copied(state)

    def _join(self, number: int, begin: int, end: int) -> None:
        second, _ = self._spans.pop(number)
        first, state = next(known for known in self._spans.values() if known[0].stop == number)
        border = begin if end == number else end
        del self._spans[first.start]
        for numbers in (range(first.start, border), range(border, second.stop)):
            if numbers:
                self._spans[numbers.start] = numbers, self._copied(state)
