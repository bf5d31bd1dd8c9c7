"""What a recorded run tells people: moments, and what cores tell them from (``master_moments`` and its like).

Epochs are counted from 1, as everywhere where people read them; tasks, batches and blocks from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: (kind, identity): ("batch", 3, 17, 2), ("task", 3, 17), ("block", 5), ("trainer", "a"), ("evaluation", "e").
#: What concerns everything is ("job",).
Subject = tuple[Any, ...]
JOB: Subject = ("job",)
#: With a moment that is of no interest but to a trainer, or to blocks: values are read.
VALUES: Subject = ("values",)
#: Name of the first record of a core.
BEGUN = "Begun"


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened, for people.

    Args:
        at: Seconds since 1970.
        process: Where.
        text: What; "{blocks}" stands for the blocks.
        subjects: Of whom it tells.
        blocks: That it is about, as ranges.
    """

    at: float
    process: str
    text: str
    subjects: frozenset[Subject]
    blocks: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Known:
    """What the moments of a run have told so far."""

    #: Attempt at the training data -> epoch and task.
    attempts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def task_of(self, attempt: int) -> list[Subject]:
        """The task that an attempt is at, if that is known."""
        return [("task", *self.attempts[attempt])] if attempt in self.attempts else []


@dataclass(slots=True)
class Teller:
    """A recorded process, as people know it; its cores find that out.

    Args:
        name: Of the process.
    """

    name: str
    #: Of a process that is one.
    trainer: Subject = ("trainer", "")

    def begun(self, event: Any) -> None:
        """A core of the process begins, and may name it."""
        about = event["about"]
        if trainer := about.get("trainer", event.get("trainer")):
            self.name, self.trainer = f"trainer {trainer}", ("trainer", trainer)
        elif "pserver" in about:
            self.name = f"pserver {about['pserver']} ({about['generation']})"


class Core:
    """Tells the moments of one core; nothing, where others tell the same.

    Args:
        process: Whose it is.
        known: What was told before.
    """

    def __init__(self, process: Teller, known: Known) -> None:
        self.process = process
        self.known = known
        #: Of the event at hand, in seconds since 1970.
        self.at = 0.0

    def moment(self, text: str, *subjects: Subject, blocks: Iterable[tuple[int, int]] = ()) -> Moment:
        """Now, in this process."""
        return Moment(self.at, self.process.name, text, frozenset(subjects), tuple(blocks))

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:  # noqa: ARG002
        """What an event and its effects mean."""
        return iter(())


def of_blocks(place: tuple[int, int]) -> list[Subject]:
    """These blocks, from begin to end."""
    return [("block", number) for number in range(*place)]


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges of neighbours, rising."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def task_of(evaluation: str, place: tuple[int, int]) -> tuple[Subject, str]:
    """A task (epoch, number) of the training data or of an evaluation, and its name."""
    if evaluation:
        return ("evaluation", evaluation), f"task {place[1]} of evaluation {evaluation}"
    return ("task", *place), f"task {place[0]}/{place[1]}"
