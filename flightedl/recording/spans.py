"""Spans of a pserver's blocks, which are followed through the records of the block protocol.

The records name a span by its first block. Splits, joins and moves change which blocks that span contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
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
    """Spans of a pserver, with the states of their blocks.

    Spans with different states may join: they have the same batches, but only one of them has restored a batch that
    the other one has applied itself. Blocks therefore keep their states when they join others.

    Args:
        begin: Returns the state of blocks without history.
        copied: Copies the state of blocks that are split or have joined others.
    """

    def __init__(self, begin: Callable[[], State], copied: Callable[[State], State]) -> None:
        self._begin = begin
        self._copied = copied
        #: First block of a span -> its parts: (adjacent blocks, their state).
        self._spans: dict[int, list[tuple[range, State]]] = {}

    def __getitem__(self, first: int) -> list[State]:
        return [state for _, state in self._spans[first]]

    def all(self) -> Iterable[tuple[range, State]]:
        """Return all blocks with their states."""
        return chain.from_iterable(self._spans.values())

    def apply(self, name: str, event: Any, effects: Effects) -> None:
        """Apply the splits, joins and moves in a record."""
        if name == BEGUN:
            self._spans = {begin: [(range(begin, end), self._begin())] for (begin, end), _ in event["extents"]}
        for each in effects:
            if "Split" in each:
                self._split(each["Split"]["span"], each["Split"]["into"])
            elif "Joined" in each:
                self._join(event["number"], *each["Joined"]["moved"])
            elif "ReleasedBlocks" in each:
                self._spans.pop(each["ReleasedBlocks"]["numbers"][0], None)
        if name == "adopt" and not effects:
            begin, end = released_of(event)["numbers"]
            self._spans[begin] = [(range(begin, end), self._begin())]

    def _split(self, first: int, into: Iterable[tuple[int, int]]) -> None:
        parts = self._spans.pop(first)
        for begin, end in into:
            cut = ((range(max(begin, numbers.start), min(end, numbers.stop)), state) for numbers, state in parts)
            self._spans[begin] = [(numbers, self._copied(state)) for numbers, state in cut if numbers]

    def _join(self, number: int, begin: int, end: int) -> None:
        second = self._spans.pop(number)
        start, first = next((at, parts) for at, parts in self._spans.items() if parts[-1][0].stop == number)
        border, stop = begin if end == number else end, second[-1][0].stop
        (before, state), (after, other) = first[-1], second[0]
        if state == other:
            first[-1:], second[:1] = [(range(before.start, after.stop), state)], []
        self._spans[start] = first + second
        self._split(start, [each for each in ((start, border), (border, stop)) if each[0] < each[1]])
