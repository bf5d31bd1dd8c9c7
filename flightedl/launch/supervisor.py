"""Supervisor of a job's processes, which carries out the policy's decisions.

One thread polls all children, asks :class:`RestartPolicy` about each one that has ended, and starts new ones. It also
kills processes that have been frozen for too long. Once the job runs, no other thread starts processes. The thread ends
with an :class:`Outcome` when the policy gives up or all trainers have finished. It does not stop the remaining
processes: the caller that waits for the outcome calls :meth:`Supervisor.stop`.

Processes are stopped in order, trainers before servers before etcd: SIGTERM, a grace period, then SIGKILL. This takes
at most five seconds, plus ``drain_s`` if the servers can write a last checkpoint.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flightedl.errors import EXIT_FAILED, EXIT_START_AGAIN, FlightedlError, UnavailableError, exit_code_of, has_finished
from flightedl.launch.policy import (
    Account,
    AllFinished,
    Decision,
    GiveUp,
    Limits,
    RestartPolicy,
    Role,
    Slot,
    SlotFinished,
    StartAgain,
    StartTogether,
    describe_exit,
)
from flightedl.launch.processes import Child, Children
from flightedl.ports import Clock

#: Starts a process. Called from the supervisor's thread with the number of starts in the slot, including this one.
Starter = Callable[[int], Child]
#: Called from the supervisor's thread with a one-sentence message for the user.
OnEvent = Callable[[str], None]

_POLL_S = 0.05
#: Maximum number of seconds by which one check extends the time for which a process counts as frozen.
_LOOK_LIMIT_S = 1.0
#: Seconds for which the other ranks of a group may keep running after one rank has ended.
_TOGETHER_S = 1.0
_STOP_RANKS: tuple[tuple[frozenset[Role], float], ...] = (
    (frozenset({Role.TRAINER}), 1.5),
    (frozenset({Role.MASTER, Role.PSERVER}), 2.0),
    (frozenset({Role.ETCD}), 0.5),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a job."""

    #: 0 if every trainer has done all of its work; ``EXIT_INCOMPLETE`` if some data could not be used.
    exit_code: int
    reason: str = ""
    #: The process whose output shows the cause, and the last lines of that output.
    slot: Slot | None = None
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessView:
    """State of one slot."""

    slot: Slot
    #: None if no process is running in the slot.
    pid: int | None
    starts: int
    is_finished: bool
    #: Seconds since the last start.
    runs_s: float = 0.0


@dataclass(slots=True)
class _Place:
    starter: Starter
    child: Child | None = None
    started_at: float = 0.0
    starts: int = 0
    #: Number of seconds for which the supervisor has found the slot's process frozen.
    frozen_s: float = 0.0
    #: Time at which to start the next process; None if there is none to start.
    due_at: float | None = 0.0


class Supervisor:
    """Keeps a process running in each slot. Thread-safe.

    Args:
        children: Starts processes and reaps them.
        starters: Starters of the slots, in the order of the first starts.
        clock: Measures delays and run times.
        limits: Limits of restarts.
        on_event: Receives a sentence about every end and every new start.
        on_end: Receives the pid of every process that has ended.
        account: Requests the job's account from the master when a trainer has ended.
        name_of: Returns the name of a slot's process for users.
        is_group: The trainers are the ranks of a group.
    """

    def __init__(
        self,
        children: Children,
        starters: Mapping[Slot, Starter],
        clock: Clock,
        limits: Limits | None = None,
        on_event: OnEvent | None = None,
        on_end: Callable[[int], None] | None = None,
        account: Callable[[], Account | None] | None = None,
        name_of: Callable[[Slot], str] = str,
        *,
        is_group: bool = False,
    ) -> None:
        self._children = children
        self._clock = clock
        self._limits = limits or Limits()
        self._policy = RestartPolicy(tuple(starters), self._limits, is_group)
        self._on_event = on_event or (lambda _text: None)
        self._on_end = on_end or (lambda _pid: None)
        self._name_of = name_of
        self._account = account or (lambda: None)
        self._places = {slot: _Place(starter) for slot, starter in starters.items()}
        self._lock = threading.Lock()
        #: Number of pservers that may end without being replaced.
        self._surplus = 0
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._outcome: Outcome | None = None
        self._checked_at = clock.now()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Fill all slots in order, then watch them from a thread.

        Raises:
            FlightedlError: a process cannot be started. Those started before it keep running until :meth:`stop`.
        """
        for slot, place in self._places.items():
            self._fill(slot, place)
        self._thread.start()

    def outcome(self, timeout_s: float = 0.0) -> Outcome | None:
        """Return how the job ended, or None if it has not ended within ``timeout_s`` seconds."""
        self._ended.wait(timeout_s)
        return self._outcome

    def give_up(self, outcome: Outcome) -> None:
        """End the job with this outcome, unless it has already ended."""
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
        self._ended.set()

    def resize_pservers(self, count: int, starter_of: Callable[[Slot], Starter]) -> None:
        """Change the number of pservers. Surplus processes are not replaced when they end."""
        with self._lock:
            known = [slot for slot in self._places if slot.role is Role.PSERVER]
            self._surplus = max(0, len(known) - count)
            numbers = (number for number in range(count + len(known)) if Slot(Role.PSERVER, number) not in known)
            for _ in range(count - len(known)):
                slot = Slot(Role.PSERVER, next(numbers))
                self._policy.add(slot)
                self._places[slot] = _Place(starter_of(slot))

    def processes(self) -> tuple[ProcessView, ...]:
        """Return the state of every slot, in order."""
        with self._lock:
            now, over = self._clock.now(), self._policy.is_finished
            return tuple(
                ProcessView(slot, p.child.pid if p.child else None, p.starts, over(slot), now - p.started_at)
                for slot, p in self._places.items()
            )

    def child(self, slot: Slot) -> Child | None:
        """Return the process running in a slot. None if none is running, or if the job has no such slot."""
        with self._lock:
            place = self._places.get(slot)
            return None if place is None else place.child

    def stop(self, drain_s: float = 0.0, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Stop watching, then stop all processes, trainers first. May be called twice.

        Args:
            drain_s: Additional time for the servers to write a last checkpoint, once all trainers have ended.
            is_hurried: Polled; all processes are killed without further delay once it returns True.
        """
        self._stopping.set()
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        for roles, grace_s in _STOP_RANKS:
            with self._lock:
                places = [place for slot, place in self._places.items() if slot.role in roles]
                running = [place.child for place in places if place.child is not None]
                for place in places:
                    place.child = None
            self._children.stop(running, grace_s + (drain_s if Role.PSERVER in roles else 0.0), is_hurried)
            for child in running if Role.TRAINER in roles else ():
                # Rounds wait for a killed trainer until its lease ends, and so does a last checkpoint.
                self._on_end(child.pid)

    def _run(self) -> None:
        # Servers keep running after the last trainer, because users may want to inspect a stopped job's results.
        while not self._stopping.wait(_POLL_S) and (self._outcome is None or has_finished(self._outcome.exit_code)):
            try:
                self._step()
            except FlightedlError as error:
                code = exit_code_of(error)
                self.give_up(Outcome(EXIT_FAILED if code == EXIT_START_AGAIN else code, str(error)))

    def _step(self) -> None:
        # If the launcher itself was frozen, it does not know what the processes did.
        since_s = min(self._clock.now() - self._checked_at, _LOOK_LIMIT_S)
        self._checked_at = self._clock.now()
        for slot, place in list(self._places.items()):
            if self._stopping.is_set():
                return
            if place.child is not None:
                self._look_at(slot, place, place.child)
                self._end_if_frozen(slot, place, since_s)
            elif place.due_at is not None and place.due_at <= self._clock.now():
                self._fill_again(slot, place)

    def _fill(self, slot: Slot, place: _Place) -> None:
        child = place.starter(place.starts + 1)
        with self._lock:
            place.child = child
            place.started_at = self._clock.now()
            place.frozen_s = 0.0
            place.starts += 1
            place.due_at = None
        if place.starts > 1:
            self._on_event(f"{slot}: a new one runs (pid {child.pid})")

    def _fill_again(self, slot: Slot, place: _Place) -> None:
        """Fill a slot. If the process cannot be started at the moment, the policy decides what to do."""
        try:
            self._fill(slot, place)
        except (UnavailableError, OSError) as error:
            self._carry_out(self._policy.not_started(slot, f"it cannot be started: {error}"), None, None)

    def _look_at(self, slot: Slot, place: _Place, child: Child) -> None:
        code = child.poll()
        if code is None:
            return
        self._children.forget(child)
        self._on_end(child.pid)
        with self._lock:
            place.child = None
        if slot.role is Role.PSERVER and code == 0 and self._surplus:
            with self._lock:
                self._surplus -= 1
                del self._places[slot]
            self._on_event(f"{self._name_of(slot)} has left the job, which has fewer pservers now")
            return
        ran_s = self._clock.now() - place.started_at
        account = self._account() if code != 0 and slot.role is Role.TRAINER else None
        for decision in self._policy.ended(slot, code, ran_s, account):
            self._carry_out(decision, child, code)

    def _end_if_frozen(self, slot: Slot, place: _Place, since_s: float) -> None:
        if place.child is None or not place.child.is_frozen:
            place.frozen_s = 0.0
            return
        place.frozen_s += since_s
        if place.frozen_s >= self._limits.frozen_s:
            who = f"{self._name_of(slot)} (pid {place.child.pid})"
            self._on_event(f"{who} was stopped by a signal {place.frozen_s:.0f} s ago: killed")
            place.child.kill()
            place.frozen_s = 0.0

    def _carry_out(self, decision: Decision, child: Child | None, code: int | None) -> None:
        """Carry out a decision about a slot. Its last process, if any, was ``child``, which exited with ``code``."""
        match decision:
            case StartAgain(slot, after_s, reason):
                self._places[slot].due_at = self._clock.now() + after_s
                delay = f" in {after_s:.1f} s" if after_s else ""
                ended = f"{self._name_of(slot)} (pid {child.pid}) ended" if child is not None else f"{slot}"
                self._on_event(f"{ended}: {reason}; a new one is started{delay}")
            case StartTogether(slot, after_s, reason):
                ended = f"{slot} (pid {child.pid}) ended" if child is not None else f"{slot}"
                self._on_event(f"{ended}: {reason}; all ranks are started again")
                self._end_trainers(self._clock.now() + after_s)
            case SlotFinished(slot, reason):
                self._on_event(f"{slot} {reason}")
            case AllFinished(exit_code):
                self.give_up(Outcome(exit_code))
            case GiveUp(slot, reason, exit_code):
                if child is not None and code is not None:
                    self._on_event(
                        f"{self._name_of(slot)} (pid {child.pid}) ended: {describe_exit(code)}; the job is stopped"
                    )
                lines = () if child is None else relevant_lines(child.tail(200))
                self.give_up(Outcome(exit_code, reason, slot, lines))

    def _end_trainers(self, due_at: float) -> None:
        places = [place for slot, place in self._places.items() if slot.role is Role.TRAINER]
        running = [place.child for place in places if place.child is not None]
        self._children.stop(running, _TOGETHER_S)
        with self._lock:
            for place in places:
                place.child, place.due_at = None, due_at
        for child in running:
            self._on_end(child.pid)


def relevant_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Select the last lines of a process's output that show why it ended.

    Return the last traceback, the last sentence of a server (``flightedl master: ...``), or the last few lines.
    """
    if lines and re.match(r"flightedl \w+: ", lines[-1]):
        return (lines[-1],)
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return tuple(lines[starts[-1] :][-60:]) if starts else tuple(lines[-10:])


def explain(outcome: Outcome) -> str:
    """Return an outcome as text: the reason, then the last lines of the process that shows it."""
    return "\n".join([outcome.reason, *(f"  {outcome.slot} | {line}" for line in outcome.last_lines)])
