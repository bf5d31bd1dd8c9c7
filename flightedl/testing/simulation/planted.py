"""Bugs planted in the product's own code, to show that a run finds them: a method of a core is replaced for the run.

Nothing in production knows of them. The bugs of ``flaws`` are in what the simulation models itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import number_of
from flightedl.domain.checkpoint.values import OrderSnapshot, Sweep
from flightedl.domain.consistency.membership import Membership
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.rounds_values import Accumulate, Arrived
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.master import effects as out
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.control import PserverControl
from flightedl.domain.master.ending import Ending
from flightedl.domain.master.evaluations import Evaluations
from flightedl.domain.master.members import Members
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.master.requests import Requests
from flightedl.domain.master.work import Work
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.pserver.life_values import ReloadAsked
from flightedl.domain.pserver.search import CheckpointSearch
from flightedl.domain.queue.state import QueueState
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.recovery.lives import PresentLife
from flightedl.domain.recovery.reinitialization import Reinitialize, RestartServers
from flightedl.testing.simulation.flaws import FLAWS
from flightedl.testing.simulation.planted_blocks import BLOCK_BUGS
from flightedl.testing.simulation.planted_protocol import PROTOCOL_BUGS
from flightedl.testing.simulation.planted_queue import QUEUE_BUGS
from flightedl.testing.simulation.planted_rows import ROW_BUGS
from flightedl.testing.simulation.planted_trainer import TRAINER_BUGS
from flightedl.testing.simulation.planted_weights import WEIGHT_BUGS

#: The original method -> what takes its place.
Make = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug: what goes wrong, and which methods are replaced."""

    what: str
    patches: tuple[tuple[Any, str, Make], ...]


def _bug(what: str, owner: type, method: str, make: Make, *more: tuple[type, str, Make]) -> Planted:
    return Planted(what, ((owner, method, make), *more))


def _always(value: object) -> Make:
    return lambda _original: lambda *_arguments, **_more: value


def _stale_completion(original: Callable[..., Any]) -> Callable[..., Any]:
    def take_reports(self: Work, ticket: Any, now: float) -> Any:
        for report in ticket.finished:
            if self.queue.is_current(ticket.trainer, report.attempt, ticket.generation):
                continue
            for holder, pieces in self.queue.holders().items():
                for piece in pieces:
                    if (piece.epoch, piece.position) == (report.epoch, report.position):
                        generation = self.queue.registrations()[holder]
                        self.queue.finish(holder, *_place(piece), now, generation=generation)
                        break
        return original(self, ticket, now)

    return take_reports


def _place(piece: Any) -> tuple[int, int, int]:
    return piece.epoch, piece.position, piece.attempt


def _whatever_is_out(original: Any) -> Any:
    def next_epoch(self: QueueState) -> int | None:
        found: int | None = original.fget(self)
        return self.pending.lowest_epoch if self.is_stopped else found

    return property(next_epoch)


def _only_this_epoch(original: Callable[..., Any]) -> Callable[..., Any]:
    def reopen(self: Pservers, lacking: dict[int, Any], queue: TaskQueue) -> Any:
        return original(self, {epoch: tasks for epoch, tasks in lacking.items() if epoch == queue.epoch}, queue)

    return reopen


def _sweep_when_ordered(original: Callable[..., Any]) -> Callable[..., Any]:
    def perform(self: Checkpointing, effects: Any) -> None:
        effects = tuple(effects)
        original(self, effects)
        if any(isinstance(each, OrderSnapshot) for each in effects):
            self._outbox.effects.append(out.StoreWork(Sweep(), 0))

    return perform


def _all_below_the_one_under_way(original: Callable[..., Any]) -> Callable[..., Any]:
    def deletable(self: Checkpoints, names: Collection[str]) -> tuple[str, ...]:
        end = self.under_way
        if end is None:
            return tuple(original(self, names))
        return tuple(name for name in sorted(names) if (number := number_of(name)) is not None and number < end)

    return deletable


def _only_the_lost(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_step(self: Pservers, *arguments: Any, **more: Any) -> Any:
        step = original(self, *arguments, **more)
        if isinstance(step, RestartServers):
            return Reinitialize(max(each.election for each in self._lacking.values()), {})
        return step

    return next_step


def _whatever_was_elected(original: Callable[..., Any]) -> Callable[..., Any]:
    """A pserver that has values keeps them, whoever else's were elected."""

    def look(self: PserverLife, *arguments: Any) -> Any:
        return () if self.is_serving else original(self, *arguments)

    return look


def _unadmitted(_original: Callable[..., Any]) -> Callable[..., Any]:
    def member_id_of(self: Membership, trainer: str) -> int | None:
        return next((member.member_id for member in self.members if member.trainer == trainer), None)

    return member_id_of


def _any_work(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, trainer, generation, _attempt: original(self, trainer, generation, None)


def _told_before_it_is_stored(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_call(self: PserverControl, index: int, generation: int) -> Any:
        call = original(self, index, generation)
        if isinstance(call, out.ControlCall):
            return out.ControlCall(index, generation, call.request, call.audit, call.pause_s, 0)
        return call

    return next_call


def _begins_from_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    def seek_values(self: PserverLife) -> Any:
        facts = self._facts
        if facts.election is not None and facts.loadable is None and not self._is_given:
            self._is_given = True
            return self._serve(facts.election, None)
        return original(self)

    return seek_values


def _no_rejected(original: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: CheckpointSearch, job: str, loadable: Any, _rejected: Any = ()) -> None:
        original(self, job, loadable)

    return begin


def _stays(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, event: () if isinstance(event, ReloadAsked) else original(self, event)


def _dropped(original: Callable[..., Any]) -> Callable[..., Any]:
    def arrive_late(self: BlockRounds, *arguments: Any) -> Any:
        held = list(self.held)
        outcome = original(self, *arguments)
        return Arrived() if isinstance(outcome, Accumulate) and len(self.held) > len(held) else outcome

    return arrive_late


def _without_the_last(original: Callable[..., Any]) -> Callable[..., Any]:
    def closable(self: BlockRounds) -> bool:
        return bool(original(self)) or (self._is_sync and self._missing == 1 and self._has_arrivals())

    return closable


def _one_early(original: Any) -> Any:
    def is_complete(self: QueueState) -> bool:
        if original.fget(self):
            return True
        counts = self.counts()
        return bool(not self.is_past_last and counts.todo == 0 and counts.pending == 1 and counts.total > 1)

    return property(is_complete)


def _beside(original: Callable[..., Any]) -> Callable[..., Any]:
    def mark_together(self: AppliedBatches, blocks: Sequence[int], batches: Any) -> Any:
        return original(self, sorted({max(block - 1, 0) for block in blocks}), batches)

    return mark_together


PLANTED: dict[str, Planted] = {
    "lost values are zeros": _bug(
        "a pserver whose values are lost begins from nothing", PserverLife, "_seek_values", _begins_from_nothing
    ),
    "what others could not load is loaded": _bug(
        "pservers that go back never agree on a checkpoint", CheckpointSearch, "__init__", _no_rejected
    ),
    "orders to go back are forgotten": _bug("a pserver that is told to go back stays", PserverLife, "apply", _stays),
    "no generation check": _bug(
        "reports of work that a past process of a pserver acknowledged count", Pservers, "counts", _always(True)
    ),
    "stale completion accepted": _bug(
        "a report under an old attempt closes whatever is there now", Work, "take_reports", _stale_completion
    ),
    "nothing is reopened": _bug("what a pserver lost is not dispatched again", Pservers, "_reopen", _always(0)),
    "only this epoch is reopened": _bug(
        "... but only what it lost of the present epoch", Pservers, "_reopen", _only_this_epoch
    ),
    "a stopped job is torn": _bug(
        "a job that was stopped ends while some blocks lack what others have", Pservers, "_claim_torn", _always(0)
    ),
    "a stopped job forgets": _bug(
        "a job that was stopped ends without what was done and lost", QueueState, "next_epoch", _whatever_is_out
    ),
    "results of a former life are served": _bug(
        "a model that begins anew is told what was measured of the one before",
        PresentLife,
        "enter",
        _always(False),
        (Evaluations, "begin_anew", _always(None)),
    ),
    "done before settled": _bug(
        "all is said to be done before it is known what a new pserver process has",
        Ending,
        "_may_end",
        lambda _: lambda _self, work, _members: work is not None and work.queue.is_over,
    ),
    "delete before publish": _bug(
        "old checkpoints are deleted when the next one is ordered",
        Checkpointing,
        "perform",
        _sweep_when_ordered,
        (Checkpoints, "deletable", _all_below_the_one_under_way),
    ),
    "only the lost ones begin anew": _bug(
        "first values are elected again while some pservers keep grown ones, and go on with them",
        Pservers,
        "next_step",
        _only_the_lost,
        (PserverLife, "_look", _whatever_was_elected),
        (PserverLife, "_begin_first_values", _whatever_was_elected),
    ),
    "a member before all have agreed": _bug(
        "a trainer is a member as soon as a view with it is made", Membership, "member_id_of", _unadmitted
    ),
    "idle members are waited for": _bug(
        "a trainer without work stays a member", Requests, "_leave_if_idle", _always(None)
    ),
    "the dead are waited for": _bug("a trainer whose lease has ended stays a member", Members, "leave", _always(None)),
    "a lost view is forgotten": _bug(
        "a view that may not have arrived is not sent again", Members, "view_lost", _always(None)
    ),
    "new members begin in the past": _bug(
        "a trainer is admitted at a round that may have closed without it", Membership, "_first_round", _always(0)
    ),
    "late gradients are dropped": _bug(
        "what comes after its round has closed without it is marked, and not added",
        BlockRounds,
        "_arrive_late",
        _dropped,
    ),
    "a round closes too early": _bug(
        "a round does not wait for the last of its members", BlockRounds, "closable", _without_the_last
    ),
    "an epoch ends early": _bug(
        "an epoch is over while a trainer still has a task of it", QueueState, "is_complete", _one_early
    ),
    "marks in another block": _bug(
        "a batch is marked as applied in the block beside it", AppliedBatches, "mark_together", _beside
    ),
    "views before they are stored": _bug(
        "pservers hear of members that a successor does not know",
        PserverControl,
        "_next_control_call",
        _told_before_it_is_stored,
    ),
}

_ROOMS = (BLOCK_BUGS, TRAINER_BUGS, QUEUE_BUGS, PROTOCOL_BUGS, WEIGHT_BUGS, ROW_BUGS)
PLANTED |= {name: Planted(*bug) for room in _ROOMS for name, bug in room.items()}


#: All that a run can be given: name -> what goes wrong.
BUGS: dict[str, str] = FLAWS | {name: bug.what for name, bug in PLANTED.items()}


@contextmanager
def planted(names: Collection[str]) -> Iterator[None]:
    """Have these bugs for as long as this lasts; names that are no planted bugs are passed over."""
    with ExitStack() as stack:
        for name in names:
            for owner, method, make in PLANTED[name].patches if name in PLANTED else ():
                original = getattr(owner, method)
                setattr(owner, method, make(original))
                stack.callback(setattr, owner, method, original)
        yield
