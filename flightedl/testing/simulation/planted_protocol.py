"""Bugs planted in membership, checkpoints, recovery and the end of the job; see ``planted``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.snapshot import PserverSnapshots, SnapshotCut
from flightedl.domain.consistency.membership import Membership
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.views import PserverView
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.master import effects as out
from flightedl.domain.master.core import MasterCore
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.pserver.life_values import State
from flightedl.domain.recovery import store_history
from flightedl.domain.recovery.replay import PserverRecovery
from flightedl.testing.simulation.planted_queue import Bugs, Original, always


def _any_answer(_original: Original) -> Original:
    def has_answered(self: Membership, index: int, _serial: int) -> bool:
        pserver = self._pservers.get(index)
        return pserver is not None and pserver.answered_serial > 0

    return has_answered


def _without_removal(original: Original) -> Original:
    def consider(self: PserverView, *arguments: Any) -> Any:
        members = dict(self._members)
        verdict = original(self, *arguments)
        if not verdict.remove or verdict.switch is not None:
            return verdict
        self._members.update({member_id: members[member_id] for member_id in verdict.remove})
        return dataclasses.replace(verdict, remove=())

    return consider


def _failed_is_written(_original: Original) -> Original:
    return lambda self, number, _reason, _now: self.manifest_written(number, "0" * 64)


def _at_once(_original: Original) -> Original:
    return lambda self, block, _version: self._versions[block] is None


def _every_order(original: Original) -> Original:
    def take(self: PserverSnapshots, *arguments: Any) -> Any:
        self._newest = None
        return original(self, *arguments)

    return take


def _first_only(_original: Original) -> Original:
    return lambda self, pservers: pservers[0] >= self._known.get(0, 0)


def _settled_unasked(_original: Original) -> Original:
    return lambda self, index: index in self._known


def _but_for_the_last_epoch(original: Original) -> Original:
    def announced(self: PserverRecovery, index: int, generation: int, summary: Any, begun: int, *more: Any) -> Any:
        return original(self, index, generation, summary, begun - 1, *more)

    return announced


def _answered_at_once(original: Original) -> Original:
    def apply(self: MasterCore, *arguments: Any) -> list[out.Effect]:
        effects: list[out.Effect] = original(self, *arguments)
        return [dataclasses.replace(e, revision=0) if isinstance(e, out.Answer) else e for e in effects]

    return apply


def _whatever_it_says(original: Original) -> Original:
    def saw(self: store_history.Witness, *arguments: Any, **more: Any) -> str:
        original(self, *arguments, **more)
        self.broken_because = ""
        return ""

    return saw


def _by_any_checkpoint(_original: Original) -> Original:
    return lambda self, _progress: self.state is State.DRAINING and self._newest_checkpoint is not None


def _by_place_in_the_file(original: Original) -> Original:
    """Blocks that a pserver needs of a file get the sets of the file's first ones."""

    def rebuilt(blocks: Sequence[tuple[AppliedBatches, int]]) -> AppliedBatches:
        seen: dict[int, int] = {}
        sources = []
        for source, _ in blocks:
            sources.append((source, seen.get(id(source), 0)))
            seen[id(source)] = seen.get(id(source), 0) + 1
        return original(sources)  # type: ignore[no-any-return]

    return rebuilt


PROTOCOL_BUGS: Bugs = {
    "a join at a round gone by": (
        "a pserver admits a member to rounds that it has closed",
        ((BlockRounds, "can_admit", always(True)),),
    ),
    "any answer admits": (
        "a pserver's answer to a view from before counts for a member that was not in it",
        ((Membership, "_has_answered", _any_answer),),
    ),
    "nobody joins again": (
        "members are not proposed again when a pserver has lost rounds",
        ((Membership, "rejoin", always([])),),
    ),
    "those who left stay": (
        "a pserver does not remove the members that a view does not name",
        ((PserverView, "consider", _without_removal),),
    ),
    "a manifest that failed is written": (
        "the pointer moves although the manifest could not be written",
        ((Checkpoints, "manifest_failed", _failed_is_written),),
    ),
    "blocks are copied at once": (
        "a checkpoint at a round has blocks of other rounds",
        ((SnapshotCut, "is_due", _at_once),),
    ),
    "old orders are new": (
        "a pserver makes a snapshot that was ordered before its present one",
        ((PserverSnapshots, "take", _every_order),),
    ),
    "applied sets by place": (
        "on another number of pservers a block gets the applied set of another block of its file",
        ((AppliedBatches, "rebuilt", _by_place_in_the_file),),
    ),
    "only the first pserver is compared": (
        "a report counts that names a past process of another pserver than the first",
        ((PserverRecovery, "accepts", _first_only),),
    ),
    "settled unasked": (
        "a new process of a pserver counts before it has said what it has",
        ((PserverRecovery, "is_settled", _settled_unasked),),
    ),
    "the present epoch is not reopened": (
        "what a pserver lacks of the epoch that goes on is not done again",
        ((PserverRecovery, "announced", _but_for_the_last_epoch),),
    ),
    "answered before it is stored": (
        "a trainer is given work that a successor does not know of",
        ((MasterCore, "apply", _answered_at_once),),
    ),
    "the last checkpoint is not waited for": (
        "all is said to be done before a checkpoint has all of it",
        ((Checkpoints, "is_over", always(True)),),
    ),
    "an older state is gone on from": (
        "a master goes on from the state of an etcd that was restored from an older backup",
        ((store_history, "older_than", always("")),),
    ),
    "who has seen more goes on": (
        "a process does not notice that its etcd has gone back",
        ((store_history.Witness, "saw", _whatever_it_says),),
    ),
    "drained by any checkpoint": (
        "a pserver that was told to end does not wait for a checkpoint that has what it has",
        ((PserverLife, "is_drained", _by_any_checkpoint),),
    ),
}
