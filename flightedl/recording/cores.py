"""The kinds of cores that are recorded: their inputs, and exceptions to the general rules of recording."""

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
from flightedl.domain.trainer.feed import ERROR_LENGTH, Feed, WaitForEvent
from flightedl.domain.trainer.first_values import ElectionOfFirstValues, FollowedElection
from flightedl.domain.trainer.membership import TrainerMembership
from flightedl.domain.trainer.readings import BatchLoop
from flightedl.domain.trainer.steps import Steps
from flightedl.messages.tasks import TasksReply

#: Name of the input that takes an event and returns effects. The event is recorded under the name of its own class.
APPLY = "apply"


@dataclass(frozen=True)
class Kind:
    """A kind of core.

    Args:
        name: Name of the kind.
        core: Class of the core.
        queries: Public methods that are not recorded, because they change nothing. All others are the core's inputs.
        inputs: Names of the recorded methods, if only a few public methods are inputs; overrides ``queries``.
        skips: Returns True for (core, method, result) if the call is not recorded.
        repeated: Frequently repeated methods and events -> the parameter that is compared with the previous call, or
            "" to compare all. A repeated call is not recorded; a repeated event refers to the previous one.
        gists: (method, parameter) -> function that returns the part of the argument that the core uses. state: Returns
        the state after a call, from (core, arguments, result). It is recorded and compared, as is the result.
        is_checked: True if a replay asserts the core's invariants after each call.
    """

    name: str
    core: Any
    queries: Collection[str] = ()
    inputs: tuple[str, ...] = ()
    skips: Callable[[Any, str, Any], bool] = lambda *_: False
    repeated: Mapping[str, str] = field(default_factory=dict)
    gists: Mapping[tuple[str, str], Callable[[Any], Any]] = field(default_factory=dict)
    state: Callable[[Any, Mapping[str, Any], Any], list[object]] | None = None
    is_checked: bool = True

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """Names of the core's inputs."""
        found = (name for name, member in vars(self.core).items() if isinstance(member, FunctionType))
        skipped = {"check", *self.queries}
        return self.inputs or tuple(name for name in found if not name.startswith("_") and name not in skipped)


class MasterKnown(msgspec.Struct, frozen=True):
    """The newest master that a pserver knows."""

    generation: int


class MemberNow(msgspec.Struct, frozen=True):
    """The membership after a call."""

    member: int
    epoch: int


def _end_of(reply: TasksReply) -> TasksReply:
    outcome = reply.outcome if reply.outcome == "epochs_done" else "none_now"
    return TasksReply(assignments=[], outcome=outcome, pservers=reply.pservers, is_ending=reply.is_ending)


def _without_chunks(reply: TasksReply) -> TasksReply:
    given = [replace(each, chunks=[], parts=[]) for each in reply.assignments]
    return replace(reply, assignments=given, ahead=[replace(each, chunks=[], parts=[]) for each in reply.ahead])


def _changes_no_block(_: BlockProtocol, name: str, result: Any) -> bool:
    match name:
        case "prepare":
            return not result.copies
        case "initialize":
            return not result
        case "split":
            return len(result.into) == 1
        case _:
            return name in {"copy", "end_cut", "join"} and result is None


_KINDS = (
    Kind("master", MasterCore, inputs=(APPLY,)),
    Kind(
        "life",
        PserverLife,
        inputs=(APPLY, "observe_master", "check_request"),
        repeated={"Seen": "", "observe_master": "", "check_request": ""},
        state=lambda core, *_: [MasterKnown(core.newest_master)],
    ),
    Kind(
        "blocks",
        BlockProtocol,
        {"span", "version", "versions", "version_range", "highest_open_round", "initialized_count", "pull", "applied"}
        | {"is_at_edge", "state_of"},
        skips=_changes_no_block,
        gists={("restore", "applied"): lambda applied: (applied.encode(), applied.numbers)},
        # Not recorded, because the check compares the marks of all blocks, and would take longer with each batch.
        is_checked=False,
    ),
    Kind(
        "snapshots",
        PserverSnapshots,
        {"is_current"},
        # The master repeats an order while versions are changing.
        repeated={"take": "snapshot"},
        gists={("failed", "reason"): lambda reason: reason[:REASON_LIMIT]},
        state=lambda core, *_: [core.progress],
    ),
    Kind(
        "feed",
        Feed,
        {"begin_ahead", "is_held"},
        skips=lambda _, name, result: isinstance(result, WaitForEvent) or (name == "begin" and result is None),
        gists={
            ("answered", "reply"): _without_chunks,
            ("failed", "error"): lambda error: error[:ERROR_LENGTH],
        },
    ),
    Kind(
        "membership",
        TrainerMembership,
        gists={("tasks_answered", "reply"): lambda reply: TasksReply(assignments=[], outcome="", member=reply.member)},
        state=lambda core, *_: [MemberNow(core.member, core.epoch)],
    ),
    Kind("loop", BatchLoop),
    Kind("acknowledged", AcknowledgedLoop),
    Kind("steps", Steps, skips=lambda _, name, result: name == "drop" and not result),
    Kind("election", ElectionOfFirstValues),
    # Recorded only if the model has changed, because otherwise the call cannot raise an error.
    Kind("election-followed", FollowedElection, skips=lambda *_: True),
    Kind(
        "end",
        JobEnd,
        skips=lambda core, name, _: name == "may_read" and not core.is_known,
        repeated={"replied": ""},
        gists={("replied", "reply"): _end_of, ("require", "reply"): _end_of},
    ),
)

CORES: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}
BY_CLASS: Mapping[type, Kind] = {kind.core: kind for kind in _KINDS}
