"""Account of a recorded run: how often the model's blocks applied each batch.

The account follows the arrays and not the protocol's marks: a batch counts when an optimizer's update contains it. It
is therefore independent of the code that decides which pushes are repetitions.

* A batch is *expected* on every block if it belongs to a task of the declared dataset in one of its epochs, unless it
  was quarantined or dropped. If a trainer stopped the job, or the dataset grew, the batches
  that any block counted are expected.
* A batch is *lost* if a block ended without it, and *double* if a block's values contain it twice. A restored pserver
  starts with the batches in its checkpoint, to which its own updates are added.
* A batch is *foreign* if the dataset lacks it, and *stray* if a trainer pushed it without having received it.

The last process that held a block before the job's end decides, because it had the final values. A pserver can also be
replaced after that, while the job shuts down, and its successor may exit before it has restored any values. A killed
process's recording may be incomplete at its end. This does not matter: such a process never has the final values, and a
push counts as stray only if its trainer's recording covers the time of the push.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.master.effects import Kind
from flightedl.messages.decoding import builtins_from_json
from flightedl.messages.parameters import Outcome
from flightedl.recording.reader import Recording
from flightedl.recording.spans import Effects, Spans, released_of
from flightedl.recording.values import BEGUN, BatchCounts

#: Maximum number of batches that a finding names.
_NAMED = 5


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of batches, over all blocks. A batch that several blocks have lost counts once."""

    #: Batches of all epochs that every block should have counted.
    expected: int
    blocks: int
    lost: int
    double: int
    foreign: int
    stray: int
    #: Batches that were quarantined or dropped, and are therefore not expected.
    excluded: int
    #: Number of times that scripts received a batch.
    computed: int
    #: Kind of error, such as "lost" -> a sentence that names some of the affected batches.
    findings: dict[str, str]

    @property
    def is_exact(self) -> bool:
        """True if every block counted every batch exactly once."""
        return not (self.lost or self.double or self.foreign or self.stray)


@dataclass(slots=True)
class _Counts:
    """Batches in the values of adjacent blocks."""

    #: Time at which a process allocated or received the blocks.
    since: float = 0.0
    #: True if the blocks and their batches came from another process.
    is_adopted: bool = False
    #: Batches that the blocks already had when their process received them; None if they had none.
    inherited: AppliedBatches | None = None
    accepted: set[Batch] = field(default_factory=set)
    #: Accepted batches that came with a gradient.
    pushed: set[Batch] = field(default_factory=set)
    #: Batch -> number of updates that contained it.
    updates: Counter[Batch] = field(default_factory=Counter)

    def copied(self) -> _Counts:
        return replace(self, accepted=set(self.accepted), pushed=set(self.pushed), updates=Counter(self.updates))


@dataclass(slots=True)
class _Trainer:
    """The batches in one trainer's recording."""

    given: set[Batch] = field(default_factory=set)
    pushed: set[Batch] = field(default_factory=set)
    #: Batches that the trainer pushed before its script had received them.
    early: set[Batch] = field(default_factory=set)
    computed: int = 0
    ended_at: float = 0.0

    def read(self, effects: Effects) -> None:
        """Read the effects of the trainer's loop and of its steps."""
        for each in effects:
            if (given := each.get("HandOut")) is not None:
                batch = given["batch"]
                self.given.add(Batch(batch["epoch"], batch["task"], batch["number"]))
                self.computed += 1
            elif (sent := each.get("Transfer", {}).get("batch")) is not None:
                named = {Batch(one["epoch"], one["task"], one["batch"]) for one in (sent["identity"], *sent["others"])}
                self.early |= named - self.given
                self.pushed |= named


@dataclass(slots=True)
class _Data:
    """The declared dataset, as the masters knew it."""

    batch_counts: BatchCounts = field(default_factory=lambda: BatchCounts(()))
    task_count: int = 0
    epochs: int | None = None
    #: True if the number of tasks in an epoch is unknown, because a trainer stopped the job or the dataset grew.
    is_open: bool = False
    excluded: set[Batch] = field(default_factory=set)

    def has(self, batch: Batch) -> bool:
        is_in_epochs = self.epochs is None or batch.epoch < self.epochs
        return is_in_epochs and batch.task < self.task_count and batch.batch < self.batch_counts(batch.task)

    def batches(self) -> Iterator[Batch]:
        for epoch in range(self.epochs or 0):
            for task in range(self.task_count):
                yield from (Batch(epoch, task, number) for number in range(self.batch_counts(task)))


class _Reading:
    """All facts from the recordings that the account needs."""

    def __init__(self) -> None:
        self.data = _Data()
        self.trainers: dict[str, list[_Trainer]] = {}
        #: (time, trainer, batch) for each accepted gradient.
        self.pushes: list[tuple[float, str, Batch]] = []
        self.spans: list[Spans[_Counts]] = []
        #: Times at which a master noted that the job was done; several if work was then lost and repeated.
        self.ends: list[float] = []

    def read(self, recording: Recording) -> None:
        header = recording.header
        spans: dict[str, Spans[_Counts]] = {}
        trainer, name = _Trainer(), ""
        # The blocks of a standby count from the time at which it takes over, if it does.
        owns_since = -math.inf
        for _, record in recording.records():
            kind = record.core.rpartition("-")[0]
            at = header.wall_s + record.at - header.clock_s
            trainer.ended_at = at
            owns_since = _owns_since(owns_since, kind, record.name, at)
            if kind not in {"master", "blocks", "loop", "steps"}:
                continue
            event, effects = builtins_from_json(record.fields), builtins_from_json(record.effects)
            if kind == "master":
                self._master(at, record.name, event, effects)
            elif kind == "blocks":
                if record.name == BEGUN:
                    # The process has given up its former blocks, such as an unfinished copy of a standby.
                    spans = {record.core: Spans(_Counts, _Counts.copied)}
                self._blocks(at, spans[record.core], record.name, event, effects)
            elif record.name == BEGUN:
                name = event["about"]["trainer"]
            else:
                trainer.read(effects)
        self.spans += spans.values() if owns_since < math.inf else ()
        for _, counts in (each for held in spans.values() for each in held.all()):
            counts.since = max(counts.since, owns_since)
        if name:
            self.trainers.setdefault(name, []).append(trainer)

    def _master(self, at: float, name: str, event: Any, effects: Effects) -> None:
        if name in {BEGUN, "DatasetIndexed"}:
            if tasks := event["tasks"]:
                self._declared(tasks.get("QueueSettings", tasks))
            if name == BEGUN and (known := event["stored"]):
                self._inherited(known.get("StoredState", known))
        elif name == "FilesJoined":
            self._declared(event | {"epochs": self.data.epochs, "follow": True})
        elif name == "Asked" and "StopRequest" in event["request"]:
            self.data.is_open = True
        for each in effects:
            news = each.get("QueueNews")
            if news is not None and not news["evaluation"] and "Quarantined" in news["effect"]:
                self._exclude(news["effect"]["Quarantined"]["piece"])
            elif each.get("Note", {}).get("kind") == Kind.JOB_DONE:
                self.ends.append(at)

    def _inherited(self, stored: Mapping[str, Any]) -> None:
        """Read what a predecessor stored just before it was killed, because its recording may lack it."""
        self.data.is_open |= stored["stop"] is not None
        failures = builtins_from_json(b64decode(stored["failures"] or b"e30="))
        for piece in failures.get("details", ()):
            self._exclude(piece)

    def _declared(self, tasks: Mapping[str, Any]) -> None:
        self.data.is_open |= tasks["follow"]
        if tasks["task_count"] >= self.data.task_count:
            self.data.batch_counts, self.data.task_count = BatchCounts(tasks["batch_counts"]), tasks["task_count"]
            self.data.epochs = tasks["epochs"]

    def _exclude(self, piece: Mapping[str, Any]) -> None:
        for number in range(piece["first_batch"], piece["end_batch"]):
            self.data.excluded.add(Batch(piece["epoch"], piece["task"], number))

    def _blocks(self, at: float, spans: Spans[_Counts], name: str, event: Any, effects: Effects) -> None:
        spans.apply(name, event, effects)
        if name == BEGUN:
            for _, counts in spans.all():
                counts.since = at
        elif name == "restore":
            for _, counts in spans.all():
                counts.inherited = _sets(event["applied"])
        elif name == "adopt" and not effects:
            released = released_of(event)
            (counts,) = spans[released["numbers"][0]]
            counts.since, counts.is_adopted = at, True
            counts.inherited = _sets((released["applied"], list(range(*released["numbers"]))))
        elif name == "push" and effects and "Pushed" in effects[0]:
            self._pushed(at, spans[event["first"]], event, effects)
        elif name == "apply_view":
            first = 0
            for each in effects[1:]:
                first = each.get("returned", first)
                _count(spans[first], [each])

    def _pushed(self, at: float, span: Sequence[_Counts], event: Any, effects: Effects) -> None:
        if effects[0]["Pushed"]["outcome"] == Outcome.ACCEPTED:
            push = event["push"]["Push"]
            batches = [Batch(*batch) for batch, _ in push["batches"]]
            for counts in span:
                counts.accepted.update(batches)
                counts.pushed.update(batches if event["has_gradient"] else ())
            if event["has_gradient"]:
                self.pushes += [(at, push["trainer"], batch) for batch in batches]
        _count(span, effects[1:])


def _owns_since(before: float, kind: str, name: str, at: float) -> float:
    """Return the time since which a pserver owns its blocks, given the time before an event; infinite for a standby."""
    if kind != "life":
        return before
    return {BEGUN: math.inf, "IndexAcquired": at}.get(name, before)


def _count(span: Sequence[_Counts], effects: Effects) -> None:
    for each in effects:
        if (update := each.get("Update")) is not None:
            for counts in span:
                counts.updates.update(Batch(*batch) for batch, _ in update["batches"])


def _sets(encoded: Any) -> AppliedBatches:
    data, numbers = msgspec.convert(encoded, tuple[bytes, list[int]])
    return AppliedBatches.decode(data, numbers)


def account(recordings: Iterable[Recording]) -> Account:
    """Return the account of a run.

    Raises:
        CorruptError: A file is damaged.
    """
    read = _Reading()
    for recording in recordings:
        read.read(recording)
    data = read.data
    owned: dict[int, _Counts] = {}
    end = max(read.ends, default=math.inf)
    for numbers, counts in sorted(
        (each for spans in read.spans for each in spans.all()), key=lambda each: each[1].since
    ):
        if counts.since <= end or counts.is_adopted:
            owned.update(dict.fromkeys(numbers, counts))
    seen: set[Batch] = set().union(*(counts.accepted for counts in owned.values()))
    if data.is_open:
        # The last processes may have restored all that they have.
        former = {batch for spans in read.spans for _, counts in spans.all() for batch in counts.accepted} - seen
        inherited_by = [_inherited_by(number, counts) for number, counts in owned.items()]
        seen |= {batch for batch in former if any(had(batch) for had in inherited_by)}
    expected = (seen if data.is_open or data.epochs is None else set(data.batches())) - data.excluded
    lost, double, foreign = set(), set(), {batch for batch in seen if not data.has(batch)}
    for number, counts in owned.items():
        had = _inherited_by(number, counts)
        lost |= {batch for batch in expected - counts.accepted if not had(batch)}
        lost |= {batch for batch in counts.pushed if batch not in counts.updates}
        double |= {batch for batch, count in counts.updates.items() if count > 1 or had(batch)}
    stray = _stray(read.pushes, read.trainers)
    kinds = {"lost": lost, "double": double, "foreign": foreign, "stray": stray}
    return Account(
        expected=len(expected),
        blocks=len(owned),
        lost=len(lost),
        double=len(double),
        foreign=len(foreign),
        stray=len(stray),
        excluded=len(data.excluded),
        computed=sum(each.computed for known in read.trainers.values() for each in known),
        findings={kind: _finding(kind, batches) for kind, batches in kinds.items() if batches},
    )


def _inherited_by(number: int, counts: _Counts) -> Callable[[Batch], bool]:
    """Return a function that tells if a block had a batch when its process received it."""
    return (lambda _: False) if counts.inherited is None else partial(counts.inherited.has, number)


def _stray(pushes: Sequence[tuple[float, str, Batch]], trainers: Mapping[str, Sequence[_Trainer]]) -> set[Batch]:
    found = {batch for known in trainers.values() for each in known for batch in each.early}
    for at, name, batch in pushes:
        covering = [each for each in trainers.get(name, ()) if at < each.ended_at]
        if covering and not any(batch in each.pushed for each in trainers[name]):
            found.add(batch)
    return found


_TEXTS = {
    "lost": "{} not counted by every block",
    "double": "{} counted twice",
    "foreign": "{} counted that the dataset does not have",
    "stray": "{} pushed by a trainer whose loop had not received it",
}


def _finding(kind: str, batches: Iterable[Batch]) -> str:
    ordered = sorted(batches)
    named = ", ".join(f"{batch.epoch + 1}/{batch.task}/{batch.batch}" for batch in ordered[:_NAMED])
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    text = _TEXTS[kind].format(f"{len(ordered)} batch{'' if len(ordered) == 1 else 'es'}")
    return f"{text} ({named}{more})"
