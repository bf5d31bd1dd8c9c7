"""What happens to a trainer's steps, and what comes of it, as it is recorded.

* What the membership says is decided by another core, while other threads speak of it. So it is a part of the event in
  which a step asks for it.
* Pservers are asked by several threads at once. What one of them was asked and what it answered, until that call was
  over, is one event: the parts of a transfer share nothing else.
* The gradients are nowhere in it, and of a sum only which batches are in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import msgspec

from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.steps import AskToJoin, Effect, Steps, TakeSum, WaitToJoin
from flightedl.domain.trainer.transfers import Call, Push, Transfer, Verdict
from flightedl.recording.values import by_name

#: (begin, end) of neighbouring blocks, and the same with the version of each of them.
Range = tuple[int, int]
VersionedRange = tuple[int, int, int]


class MembershipSaid(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the membership said while an event happened, in its order."""

    #: Whether a batch was begun as a member, and as which one, and its step.
    begun: list[tuple[bool, int, int]] = []
    #: What an answer of the master meant, and the mode that came with it.
    joined: list[tuple[str, dict[str, Any] | None]] = []
    #: The present membership.
    members: list[int] = []


class StepEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happens to the steps of a trainer."""


class StepsBegun(StepEvent, frozen=True):
    """The first event. ``shards``: of each pserver, its blocks."""

    trainer: str
    shards: list[list[Range]]
    mode: dict[str, Any]


class WorkEvent(StepEvent, frozen=True, omit_defaults=True, kw_only=True):
    """An event that begins some work or continues it, up to its next effect or its end."""

    said: MembershipSaid = MembershipSaid()


class BatchOpening(WorkEvent, frozen=True):
    """As ``Steps.open_batch``; ``is_new``: it was not opened before."""

    epoch: int
    task: int
    attempt: int
    batch: int
    records: int
    is_new: bool


class BatchClosing(WorkEvent, frozen=True):
    """As ``Steps.close_batch``, of the batch that was opened last; ``is_rejected``: its gradient was rejected."""

    is_rejected: bool = False


class StepCalled(WorkEvent, frozen=True):
    """As ``Steps.step``, likewise."""


class PushCalled(WorkEvent, frozen=True):
    """As ``Steps.push``, likewise."""

    blocks: list[Range]


class PullCalled(WorkEvent, frozen=True):
    """As ``Steps.pull``; ``is_of_batch``: at the rounds of the batch that was opened last."""

    is_of_batch: bool
    blocks: list[Range]
    min_version: int


class RefreshCalled(WorkEvent, frozen=True):
    """As ``Steps.refresh``."""


class SumPushed(WorkEvent, frozen=True):
    """As ``Steps.push_sum``."""


class CarriedOut(WorkEvent, frozen=True):
    """The effect was carried out."""


class NotCarriedOut(WorkEvent, frozen=True):
    """The effect ended with this error, or nobody waits for it any more."""

    error: str


class SumGivenUp(StepEvent, frozen=True):
    """As ``Steps.give_up_sum``."""


class BatchAbandoned(StepEvent, frozen=True):
    """As ``Steps.abandon_batch``."""


class GradientsAdded(StepEvent, frozen=True, omit_defaults=True):
    """As ``Steps.add``; no names: the same ones as the last time."""

    names: list[str] | None = None


class PserverAsked(StepEvent, frozen=True, omit_defaults=True):
    """One call of a pserver, as of ``ShardTransfer``."""

    index: int
    #: Of the process that was asked; None: there was none to be asked.
    generation: int | None = None
    #: (blocks, outcome, version of the values that came, batches that they have of a sum).
    answers: list[tuple[Range, int, int | None, bytes]] = []
    #: How it ended; empty and no error: it did not, and nobody waits for it any more.
    is_through: bool = False
    error: str = ""
    is_transient: bool = False


class TransferGivenUp(StepEvent, frozen=True):
    """As ``Transfer.give_up``."""


class Transferred(msgspec.Struct, frozen=True, omit_defaults=True):
    """A transfer begins."""

    member: int
    pushes: list[Range] = []
    pulls: list[VersionedRange] = []
    pull_after_push: bool = False
    #: The one version that the batch counts as computed at; None: each block's own.
    base_version: int | None = None


class Asked(msgspec.Struct, frozen=True):
    """What a pserver is asked: blocks with the versions that their gradients were computed at, or that are wanted."""

    call: str
    blocks: list[VersionedRange]


class SumTaken(msgspec.Struct, frozen=True):
    """A sum is about to be pushed: numbers of its batches, what they weigh, and divisors of so many parameters."""

    batches: list[int]
    records: int
    divisors: list[tuple[int, int]]


class Returned(msgspec.Struct, frozen=True, omit_defaults=True):
    """The work is over; ``error``: it ended with one."""

    result: bool | None = None
    error: str = ""


class BatchNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a batch has come to when a work is over."""

    number: int
    waits: bool = False
    must_repeat: bool = False
    generations: dict[int, int] = {}
    #: First batch of the sum that it has to be pushed in again, and of how many.
    again: Range | None = None
    failure: str = ""


EVENTS = by_name(kind for base in (StepEvent, WorkEvent) for kind in base.__subclasses__() if kind is not WorkEvent)
LOST: dict[str, Any] = {"MembershipLost": {}}


def ranges(numbers: Iterable[int]) -> list[Range]:
    """Numbers as neighbours, rising."""
    return [(begin, end) for begin, end, _ in versioned(dict.fromkeys(numbers, 0))]


def versioned(versions: Mapping[int, int]) -> list[VersionedRange]:
    """Block -> version as neighbours of one version, rising."""
    numbers = sorted(versions)
    if numbers and numbers[-1] - numbers[0] + 1 == len(numbers) and len(set(versions.values())) == 1:
        return [(numbers[0], numbers[-1] + 1, versions[numbers[0]])]
    found: list[VersionedRange] = []
    for _, neighbours in groupby(enumerate(numbers), lambda pair: (pair[1] - pair[0], versions[pair[1]])):
        places = [number for _, number in neighbours]
        found.append((places[0], places[-1] + 1, versions[places[0]]))
    return found


def blocks_in(known: Iterable[Range]) -> list[int]:
    """The numbers in these ranges."""
    return [number for begin, end in known for number in range(begin, end)]


def asked(call: Call) -> Asked:
    """A call of a pserver, as it is recorded."""
    if isinstance(call, Push):
        return Asked("push", versioned({block: call.bases[block] for block in call.blocks}))
    return Asked("pull", versioned(call.wanted))


def verdict_said(verdict: Verdict) -> object:
    """What follows from how a call has ended, likewise."""
    return {type(verdict).__name__: {}}


def effect_said(effect: Effect) -> object:
    """An effect of a work, likewise."""
    match effect:
        case Transfer():
            pushes, pulls = [shard.pushes for shard in effect.shards], [shard.pulls for shard in effect.shards]
            base = None if effect.current is None else effect.current.base_version
            wanted = {block: version for each in pulls for block, version in each.items()}
            pushed = ranges(block for each in pushes for block in each)
            return Transferred(effect.member, pushed, versioned(wanted), effect.pull_after_push, base)
        case TakeSum(together, divisors):
            numbers = [together.number, *(each.batch for each in together.further)]
            counts = {value: list(divisors.values()).count(value) for value in sorted(set(divisors.values()))}
            return SumTaken(numbers, together.record_count, list(counts.items()))
        case AskToJoin():
            return {"AskToJoin": {}}
        case WaitToJoin():
            return {"WaitToJoin": {}}


def batch_now(batch: CurrentBatch) -> BatchNow:
    """A batch, likewise."""
    again = None if batch.again is None else (batch.again.first, batch.again.batch_count)
    failure = "" if batch.failure is None else type(batch.failure).__name__
    generations = dict(sorted(batch.generations.items()))
    return BatchNow(batch.number, batch.waits, batch.must_repeat, generations, again, failure)


def returned(result: bool | None, error: BaseException | None, batches: Iterable[CurrentBatch]) -> list[object]:
    """The end of a work, likewise, with the batches that it may have changed."""
    name = "" if error is None else type(error).__name__
    return [Returned(result, name), *map(batch_now, batches)]


def batches_at(steps: Steps, current: CurrentBatch | None) -> list[CurrentBatch]:
    """Those that a work may change."""
    found = [] if steps.sums is None else list(steps.sums.members)
    return found if current is None or any(each is current for each in found) else [*found, current]
