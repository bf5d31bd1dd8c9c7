"""Membership of this rank in the current start of its group: the rank joins, reports its rounds, and leaves.

A rank may start rounds while its lease is valid by its own clock, until the master declares that this start of the
group has ended. Rounds require no running master, but a rank that was frozen for seconds first asks the master.

A thread reports the newest round a few times a second. If the previous start ended because a rank died, every rank
reports each round before starting it, until it has passed the records at which that rank died. This tells the master
which records kill ranks.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from flightedl.client.connections import SLICE_S, persistently
from flightedl.client.data.start_name import start_name
from flightedl.client.process import TrainerProcess
from flightedl.domain.groups.incarnation import OVER_TEXT
from flightedl.domain.groups.plan import Round
from flightedl.errors import (
    FencedError,
    FlightedlError,
    UnavailableError,
    UnregisteredError,
    exit_code_of,
    has_finished,
)
from flightedl.messages.base import Reply, decode, encode
from flightedl.messages.groups import (
    GroupLeaveRequest,
    GroupPlaceReply,
    GroupPlaceRequest,
    GroupStartReply,
    GroupStartRequest,
    Piece,
)

Answer = TypeVar("Answer", bound=msgspec.Struct)

_REPORT_S = 0.5
#: Reporting interval while rounds are watched, as a fraction of the normal interval.
_WATCHED_PART = 0.1
#: Seconds for which rounds are watched after a dead rank's last report, because that rank may have trained further.
_WATCHED_S = 2.0
#: Minimum time to live of a rank's lease, because a script that loads a model may block other threads for seconds. A
#: long lease costs nothing: the next start of the group does not wait for leases of the previous start.
_LEASE_S = 30.0
#: Seconds after which a rank names the likely reason why another one does not ask for its first batch.
_LATE_S = 60.0
_NEVER = (
    "If it never asks, its script may read the data through rank 0 alone, as after `accelerator.prepare(loader)`: "
    "prepare the model and the optimizer, but not the data"
)
#: Number of reporting intervals without a reply after which a rank asks the master before it starts a round.
_UNCONFIRMED_PART = 4
_CONFIRM_S = 0.5
#: Timeout in seconds for the last report of a rank whose script has raised an exception.
_RAISED_S = 2.0
#: Pattern of the messages of errors that a rank raises because another rank has ended.
_OF_OTHERS = re.compile(r"gloo|nccl|closed by peer|reset by peer|broken pipe|TCPStore", re.IGNORECASE)


def is_own_failure(error: BaseException) -> bool:
    """Return True if the rank's own script caused the error; False for signals and for errors caused by other ranks."""
    if not isinstance(error, Exception) or isinstance(error, FlightedlError):
        return False
    kinds = {kind.__name__ for kind in type(error).__mro__}
    is_of_runtime = bool(kinds & {"RuntimeError", "OSError"})
    return "DistError" not in kinds and not (is_of_runtime and _OF_OTHERS.search(str(error)))


class GroupAttendance:
    """Membership of one rank in a single start of its group.

    Args:
        process: This process.
        rank: Rank of this process among all processes that are started together.
        size: Number of these processes.
        plan: The settings that decide which records a rank gets, as text for users. Equal on every rank.
    """

    def __init__(self, process: TrainerProcess, rank: int, size: int, plan: str) -> None:
        self._process = process
        self._rank = rank
        self._size = size
        self._plan = plan
        self._held = process.registration.held
        self._held.hold_for(max(self._held.ttl_s, _LEASE_S))
        self._incarnation = 0
        #: Records that are excluded because they killed ranks in earlier starts.
        self.left_out: list[Piece] = []
        #: True if the job was stopped. From then on, this rank reports each round before it starts the round.
        self.is_stopping = False
        #: Last round before which the stopped group may start a round; None if not known yet.
        self._stop_after: int | None = None
        self._watched_until = 0
        self._watched_since: float | None = None
        self._has_finished = False
        #: Returns the next report, about the most recent round. Most rounds are not reported.
        self._place: Callable[[], GroupPlaceRequest] | None = None
        #: Interval between two reports in seconds, and the time of the last report to which a master replied.
        self._every_s, self._confirmed_at = _REPORT_S, 0.0
        #: Reason why this rank must not start another round; empty if it may start one.
        self._over = ""
        self._closing = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="flightedl-group", daemon=True)

    # joining

    def begin(self, token: str, position: str) -> str:
        """Report the token that this rank has loaded (empty if none). Return the token that all ranks must use.

        Raises:
            UsageError: the ranks have loaded different tokens, or disagree about their number.
            FencedError: this start of the group is over.
            UnavailableError: other ranks have not asked for their first batches within ``start_timeout_s``.
        """
        held = self._held
        process, began = self._process, self._process.clock.now()
        look_up = start_name(process.keys.job_name, process.start, self._rank, held.generation, process.own_master)
        waiting = self._process.waiting()
        try:
            while True:
                self._require_lease()
                reply = GroupStartReply(waiting_for="rank 0 to publish this start of the group")
                if (name := look_up()) is not None:
                    request = GroupStartRequest(
                        **self._own(),
                        start=name,
                        size=self._size,
                        token=token,
                        position=position,
                        plan=self._plan,
                    )
                    reply = self._ask("group_start", request, GroupStartReply)
                if reply.incarnation:
                    break
                waited_s = process.clock.now() - began
                hint = f". {_NEVER}" if waited_s >= _LATE_S else ""
                if waited_s >= process.start_timeout_s:
                    text = f"this rank has waited for {waited_s:.0f} s (FLIGHTEDL_START_TIMEOUT_S) for"
                    raise UnavailableError(f"{text} {reply.waiting_for}{hint}")
                waiting.patiently(f"{reply.waiting_for}{hint}")
                waiting.pause()
        finally:
            waiting.over()
        self._incarnation = reply.incarnation
        self.left_out = reply.left_out
        self.is_stopping = reply.is_stopping
        self._watched_until = reply.watched_until
        self._confirmed_at = self._process.clock.now()
        self._reporter.start()
        return reply.token

    def _own(self) -> dict[str, Any]:
        process = self._process
        own = {"trainer": process.trainer, "generation": self._held.generation, "job": process.keys.job_name}
        return own | {"rank": self._rank}

    def _ask(self, verb: str, request: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Repeat a request until a master replies. Raises FencedError if the lease is lost, or the request's errors."""

        def attempt() -> Answer:
            self._require_lease()
            try:
                return self._once(verb, request, kind, SLICE_S)
            except UnregisteredError:
                raise FencedError(OVER_TEXT) from None

        return persistently(self._process.waiting(), attempt)

    def _once(self, verb: str, request: msgspec.Struct, kind: type[Answer], timeout_s: float) -> Answer:
        return decode(self._process.servers.master().action(verb, encode(request), timeout_s=timeout_s), kind)

    def _require_lease(self) -> None:
        own = self._process.own_master
        if reason := self._over or (own.over() if own else "") or self._held.lost_because:
            raise FencedError(reason if reason == OVER_TEXT else f"{reason}: start this rank again")

    # rounds

    def take(self, at: int, step: Round, uncommitted: Sequence[Round] = ()) -> bool:
        """Record that this rank starts a round.

        Args:
            at: Number of records before the round, over all epochs.
            step: The round.
            uncommitted: Earlier rounds that the rank may still be training on, so they may kill it, too.

        Returns:
            False if the job was stopped, and the master has chosen an earlier round as the group's last one.

        Raises:
            FencedError: this start of the group is over.
        """
        self._require_lease()
        is_stopping = self.is_stopping
        place = partial(self._request, at, [*uncommitted, step], is_stopping=is_stopping)
        if self._stop_after is not None and at > self._stop_after:
            return False
        self._place = place
        now = self._process.clock.now()
        if is_stopping or self._is_watched(at):
            self._learn(self._ask("group_at", place(), GroupPlaceReply))
        elif now - self._confirmed_at > _UNCONFIRMED_PART * self._every_s:
            # No report has been confirmed for some time: either this process was frozen, or no master is running.
            self._confirm(place(), _CONFIRM_S)
            self._confirmed_at = max(self._confirmed_at, now)
        self._require_lease()
        return not is_stopping or self._stop_after is None or at <= self._stop_after

    def _request(self, at: int, steps: Sequence[Round], *, is_stopping: bool) -> GroupPlaceRequest:
        return GroupPlaceRequest(
            **self._own(),
            incarnation=self._incarnation,
            at=at,
            end=at + steps[-1].end - steps[-1].records,
            pieces=[
                (step.epoch, step.order.lanes, step.order.window, each.lane, each.first_record, each.end_record)
                for step in steps
                for each in step.pieces
            ],
            is_stopping=is_stopping,
        )

    def _is_watched(self, at: int) -> bool:
        if not self._watched_until:
            return False
        now = self._process.clock.now()
        if self._watched_since is None and at >= self._watched_until:
            self._watched_since = now
        if self._watched_since is not None and now - self._watched_since > _WATCHED_S:
            self._watched_until = 0
        return bool(self._watched_until)

    def _report(self) -> None:
        while not self._closing.wait(self._every_s * (_WATCHED_PART if self._watched_until else 1)):
            if self._place is not None:
                self._confirm(self._place(), _RAISED_S)

    def _confirm(self, place: GroupPlaceRequest, timeout_s: float) -> None:
        """Ask the master if this start is current. If no master replies, continue while the lease is valid."""
        sent_at = self._process.clock.now()
        try:
            reply = self._once("group_at", place, GroupPlaceReply, timeout_s)
        except FlightedlError:
            return
        self._confirmed_at, self._every_s = sent_at, reply.every_s
        self._learn(reply)

    def _learn(self, reply: GroupPlaceReply) -> None:
        if not reply.is_current:
            self._over = OVER_TEXT
        self._stop_after = reply.stop_after
        self.is_stopping |= reply.is_stopping

    # leaving

    def finish(self) -> None:
        self._has_finished = True

    def leave(self, error: BaseException | None) -> None:
        """Leave the group before the lease ends. Return when the master has stored that this rank has left.

        Args:
            error: The exception that ends the session, if one does.

        Raises:
            FencedError: the session ends cleanly, but this start of the group is over.
        """
        if self._reporter.ident is None or self._closing.is_set():
            return
        self._closing.set()
        self._reporter.join()
        request = GroupLeaveRequest(
            **self._own(),
            incarnation=self._incarnation,
            is_clean=has_finished(exit_code_of(error)),
            has_finished=self._has_finished,
            error=f"{type(error).__name__}: {error}"[:1000] if error is not None and is_own_failure(error) else "",
        )
        if request.is_clean:
            self._ask("group_leave", request, Reply)
            return
        try:
            if self._place is not None:
                self._once("group_at", self._place(), GroupPlaceReply, _RAISED_S)
            self._once("group_leave", request, Reply, _RAISED_S)
        except FlightedlError:
            # If the report fails, the master notices when the lease expires.
            return
