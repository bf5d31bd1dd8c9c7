"""The kinds of cores that are recorded: their inputs, and what each of them leaves out or adds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any

import msgspec
from msgspec.structs import replace

from flightedl.domain.checkpoint.snapshot import REASON_LIMIT, PserverSnapshots
from flightedl.domain.master.core import MasterCore
from flightedl.domain.pserver.blocks import BlockProtocol
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.trainer.acknowledged import AcknowledgedLoop
from flightedl.domain.trainer.ending import JobEnd
from flightedl.domain.trainer.feed import ERROR_LENGTH, Feed, LookAgain
from flightedl.domain.trainer.first_values import ElectionOfFirstValues, FollowedElection
from flightedl.domain.trainer.membership import TrainerMembership
from flightedl.domain.trainer.readings import BatchLoop
from flightedl.domain.trainer.steps import Steps
from flightedl.messages.tasks import TasksReply

#: An input of this name takes an event, which is written under its own name, and returns effects.
APPLY = "apply"


@dataclass(frozen=True)
class Kind:
    """A kind of core.

    Args:
        name: Of the kind.
        core: Its class.
        queries: Public methods that are not recorded, because they change nothing; all others are the core's inputs.
        inputs: The methods that are recorded, if few of the public ones are.
        skips: Decides from (core, method, result) that a call is not written.
        repeated: Methods and events that come again and again -> the parameter by which calls are the same; empty: all
            of them. A call that is the same as the one before is not written; an event refers to the one before.
        gists: (method, parameter) -> the part of the argument that is looked at.
        tells: From (core, arguments, result), the state after a call that is written, and compared, with the result.
        is_checked: A replay asserts the invariants of the core after each call.
    """

    name: str
    core: Any
    queries: Collection[str] = ()
    inputs: tuple[str, ...] = ()
    skips: Callable[[Any, str, Any], bool] = lambda *_: False
    repeated: Mapping[str, str] = field(default_factory=dict)
    gists: Mapping[tuple[str, str], Callable[[Any], Any]] = field(default_factory=dict)
    tells: Callable[[Any, Mapping[str, Any], Any], list[object]] | None = None
    is_checked: bool = True

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The core's inputs."""
        found = (name for name, member in vars(self.core).items() if isinstance(member, FunctionType))
        skipped = {"check", *self.queries}
        return self.inputs or tuple(name for name in found if not name.startswith("_") and name not in skipped)


class MasterKnown(msgspec.Struct, frozen=True):
    """The newest master that a pserver has heard of."""

    generation: int


class MemberNow(msgspec.Struct, frozen=True):
    """The membership after a call."""

    member: int
    epoch: int


def _end_of(reply: TasksReply) -> TasksReply:
    """The part of an answer that a job's end looks at."""
    outcome = reply.outcome if reply.outcome == "epochs_done" else "none_now"
    return TasksReply(assignments=[], outcome=outcome, pservers=reply.pservers, is_ending=reply.is_ending)


def _without_chunks(reply: TasksReply) -> TasksReply:
    """An answer without the places of records: a feed does not look at them."""
    given = [replace(each, chunks=[]) for each in reply.assignments]
    return replace(reply, assignments=given, ahead=[replace(each, chunks=[]) for each in reply.ahead])


def _changes_no_block(_: BlockProtocol, name: str, result: Any) -> bool:
    """Decide that a call changed nothing."""
    match name:
        case "prepare":
            return not result.copies
        case "initialize":
            return not result
        case "split":
            return len(result.into) == 1
        case _:
            return name in {"copy", "end_cut"} and result is None


_KINDS = (
    Kind("master", MasterCore, inputs=(APPLY,)),
    Kind(
        "life",
        PserverLife,
        inputs=(APPLY, "hear_of_master", "check_request"),
        repeated={"Seen": "", "hear_of_master": "", "check_request": ""},
        tells=lambda core, *_: [MasterKnown(core.newest_master)],
    ),
    Kind(
        "blocks",
        BlockProtocol,
        {"span", "version", "versions", "version_range", "highest_open_round", "initialized_count", "pull", "applied"},
        skips=_changes_no_block,
        gists={("restore", "applied"): lambda applied: (applied.encode(), applied.numbers)},
        # Marks of all blocks are compared there, which would take longer with each batch.
        is_checked=False,
    ),
    Kind(
        "snapshots",
        PserverSnapshots,
        {"is_current"},
        # The same order comes again and again, while versions change.
        repeated={"take": "snapshot"},
        gists={("failed", "reason"): lambda reason: reason[:REASON_LIMIT]},
        tells=lambda core, *_: [core.progress],
    ),
    Kind(
        "feed",
        Feed,
        {"begin_ahead", "is_held"},
        skips=lambda _, name, result: isinstance(result, LookAgain) or (name == "begin" and result is None),
        gists={
            ("answered", "reply"): _without_chunks,
            ("failed", "error"): lambda error: error[:ERROR_LENGTH],
        },
    ),
    Kind(
        "membership",
        TrainerMembership,
        gists={("tasks_answered", "reply"): lambda reply: TasksReply(assignments=[], outcome="", member=reply.member)},
        tells=lambda core, *_: [MemberNow(core.member, core.epoch)],
    ),
    Kind("loop", BatchLoop),
    Kind("acknowledged", AcknowledgedLoop),
    Kind("steps", Steps, skips=lambda _, name, result: name == "drop" and not result),
    Kind("election", ElectionOfFirstValues),
    # It is written where the model is another one, which raises.
    Kind("election-followed", FollowedElection, skips=lambda *_: True),
    Kind(
        "end",
        JobEnd,
        skips=lambda core, name, _: name == "may_read" and not core.is_known,
        repeated={"heard": ""},
        gists={("heard", "reply"): _end_of, ("require", "reply"): _end_of},
    ),
)

CORES: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}
BY_CLASS: Mapping[type, Kind] = {kind.core: kind for kind in _KINDS}
