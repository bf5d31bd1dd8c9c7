"""Exhaustive exploration: visits every state that some order of events can reach, each once."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

State = TypeVar("State", bound=Hashable)


class ViolationError(AssertionError):
    """An order of events that leads to a forbidden state."""


@dataclass
class Explored(Generic[State]):
    """Result of an exploration. ``parents`` maps a state to (event, previous state), and the first state to None."""

    parents: dict[State, tuple[str, State] | None] = field(default_factory=dict)
    #: Number of events by the first word of their names.
    events: dict[str, int] = field(default_factory=dict)
    transitions: int = 0

    def path_to(self, state: State) -> list[str]:
        """Return the events that lead to a state, in order."""
        events: list[str] = []
        while (step := self.parents[state]) is not None:
            events.append(step[0])
            state = step[1]
        return events[::-1]


def explore(
    first: State,
    steps: Callable[[State], Iterable[tuple[str, State]]],
    check: Callable[[State], str | None],
    is_end: Callable[[State], bool] = lambda _: False,
    limit: int = 10_000_000,
) -> Explored[State]:
    """Explore breadth first, so that a violation is found with the fewest events.

    Args:
        first: The initial state.
        steps: Yields the name of each event that may happen in a state, with the following state.
        check: Returns the error of a state, or None.
        is_end: True for states in which the work is done. If there are any, every state must be able to reach one.
        limit: Maximum number of states.

    Raises:
        ViolationError: A state is wrong. The error names the events that lead to it.
    """
    found: Explored[State] = Explored({first: None})
    before: dict[State, list[State]] = {}
    ends: list[State] = []
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        if is_end(state):
            ends.append(state)
        for event, after in _steps_of(found, state, steps):
            found.transitions += 1
            before.setdefault(after, []).append(state)
            if after in found.parents:
                continue
            found.parents[after] = event, state
            kind = event.partition(" ")[0]
            found.events[kind] = found.events.get(kind, 0) + 1
            if wrong := check(after):
                raise ViolationError("\n".join([wrong, *found.path_to(after)]))
            assert len(found.parents) < limit, f"more than {limit} states"
            waiting.append(after)
    _require_reachable(found, before, ends)
    return found


def _steps_of(
    found: Explored[State], state: State, steps: Callable[[State], Iterable[tuple[str, State]]]
) -> Iterator[tuple[str, State]]:
    try:
        yield from steps(state)
    except AssertionError as error:
        raise ViolationError("\n".join([f"assertion: {error}", *found.path_to(state)])) from error


def _require_reachable(found: Explored[State], before: dict[State, list[State]], ends: list[State]) -> None:
    if not ends:
        return
    reaching = set(ends)
    waiting = list(ends)
    while waiting:
        for state in before.get(waiting.pop(), ()):
            if state not in reaching:
                reaching.add(state)
                waiting.append(state)
    stuck = next((state for state in found.parents if state not in reaching), None)
    if stuck is not None:
        raise ViolationError("\n".join(["the work cannot end any more after", *found.path_to(stuck)]))
