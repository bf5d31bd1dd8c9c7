"""Moments: descriptions, for people, of events in a recorded run, and the base class of their sources.

Epochs are numbered from 1, as in all output for users. Tasks, batches and blocks are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: (kind, identity): ("batch", 3, 17, 2), ("task", 3, 17), ("block", 5), ("trainer", "a"), ("evaluation", "e").
Subject = tuple[Any, ...]
#: Subject of moments that concern the whole job.
JOB: Subject = ("job",)
#: Subject of moments at which a trainer reads values, which concern only the trainer and the blocks.
VALUES: Subject = ("values",)
#: Name of a core's first record.
BEGUN = "Begun"
#: Effects of an event, each as {class: fields}.
Effects = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Moment:
    """A human-readable event.

    Args:
        at: Seconds since 1970.
        process: Name of the process.
        text: Description of the event, with the placeholder "{blocks}" for the blocks.
        subjects: Subjects of the event.
        blocks: Blocks of the event, as ranges (start, end).
    """

    at: float
    process: str
    text: str
    subjects: frozenset[Subject]
    blocks: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Known:
    """Facts from earlier moments of a run."""

    #: Attempt at a task of the training data -> (epoch, task).
    attempts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def work_of(self, evaluation: str, attempt: int) -> list[Subject]:
        """Return the evaluation, or the training-data task, to which the attempt belongs; empty if unknown."""
        if evaluation:
            return [("evaluation", evaluation)]
        return [("task", *self.attempts[attempt])] if attempt in self.attempts else []


@dataclass(slots=True)
class Process:
    """Names of a recorded process, taken from the records of its cores.

    Args:
        name: Name of the process, for display.
    """

    name: str
    #: The process as a subject, if it is a trainer.
    trainer: Subject = ("trainer", "")

    def begun(self, event: Any) -> None:
        """Update the names from a core's first record."""
        about = event["about"]
        if trainer := about.get("trainer", event.get("trainer")):
            self.name, self.trainer = f"trainer {trainer}", ("trainer", trainer)
        elif "pserver" in about:
            self.name = f"pserver {about['pserver']} ({about['generation']})"


class CoreMoments:
    """Yields the moments of one core. This base class yields none.

    Args:
        process: Process of the core.
        known: Facts known from previous moments.
    """

    def __init__(self, process: Process, known: Known) -> None:
        self.process = process
        self.known = known
        #: Time of the current event, in seconds since 1970.
        self.at = 0.0

    def moment(self, text: str, *subjects: Subject, blocks: Iterable[tuple[int, int]] = ()) -> Moment:
        """Return a moment of this process at the time of the current event."""
        return Moment(self.at, self.process.name, text, frozenset(subjects), tuple(blocks))

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:  # noqa: ARG002
        """Yield the moments that follow from an event and its effects."""
        return iter(())


def of_blocks(place: tuple[int, int]) -> list[Subject]:
    """Return the blocks in a range (start, end) as subjects."""
    return [("block", number) for number in range(*place)]


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges (start, end) in ascending order."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def task_of(evaluation: str, place: tuple[int, int]) -> tuple[Subject, str]:
    """Return the subject and the name of a task, given as (epoch, number), of the training data or an evaluation."""
    if evaluation:
        return ("evaluation", evaluation), f"task {place[1]} of evaluation {evaluation}"
    return ("task", *place), f"task {place[0]}/{place[1]}"
