"""Scheduler of the simulation: logical threads in virtual time, one at a time, in an order drawn from a seed.

Each logical thread is a greenlet. It runs until it blocks, and sometimes gives way where it takes a lock. The next one
is drawn among those that can run. If none can, time advances to the next timer. So a seed determines the whole run,
and waiting costs nothing.

Computing takes no virtual time. Slow machines are simulated by *naps*: a thread that takes a lock sometimes sleeps
before it does. Without naps and slow links, races between a decision and its effect are almost never met.

Sources of chance are separate (``stream``), so that a change of one of them leaves the others as they were.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import greenlet

#: Switches without an advance of time, after which the run cannot be making progress.
_SWITCHES_LIMIT = 500_000


class AbandonedError(BaseException):
    """Ends a logical thread after the end of the simulation. The product does not catch it: it is no Exception."""


class HangsError(AssertionError):
    """The run cannot end: all threads wait for ever, time does not advance, or it has advanced too far."""


class Process:
    """A simulated process: the logical threads that are killed and frozen together.

    Args:
        name: Unique name, for logs.
        pid: Its number.
        host: Name of its machine.
    """

    def __init__(self, name: str, pid: int, host: str) -> None:
        self.name = name
        self.pid = pid
        self.host = host
        self.is_alive = True
        self.is_frozen = False
        #: Difference between this process's wall clock and virtual time.
        self.wall_offset_s = 0.0
        #: Handles the error that has ended one of its threads.
        self.excepthook: Callable[..., object] | None = None
        #: Called with the reason when the process is asked to terminate.
        self.on_termination: Callable[[str], None] | None = None
        #: Called when the process has been killed.
        self.on_death: list[Callable[[], None]] = []
        #: Threads that became ready while the process was frozen.
        self.waking: list[Thread] = []


class Thread:
    """A logical thread."""

    __slots__ = ("end", "green", "is_done", "is_ready", "locals", "name", "number", "process", "timer", "waits_for")

    def __init__(self, number: int, name: str, process: Process) -> None:
        self.number = number
        self.name = name
        self.process = process
        self.green: greenlet.greenlet | None = None
        self.is_ready = False
        self.is_done = False
        #: Number of the timer that wakes it; 0 if there is none.
        self.timer = 0
        #: What it is blocked on, for reports.
        self.waits_for = ""
        #: Values of thread-local objects, by their number.
        self.locals: dict[int, dict[str, object]] = {}
        #: Called when the thread has ended.
        self.end: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return f"{self.process.name} {self.name}"


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a thread yields to others before it acquires a lock.

    Args:
        give_way: Probability that the thread yields.
        nap: Probability that the thread sleeps.
        nap_s: Maximum length of this sleep in virtual seconds.
    """

    give_way: float = 0.1
    nap: float = 0.002
    nap_s: float = 0.05


class Scheduler:
    """Runs logical threads.

    Args:
        seed: Determines all choices.
        pace: How often threads yield.
        keeps_history: True to keep a line for each switch, for comparing two runs.
    """

    def __init__(self, seed: int, pace: Pace | None = None, *, keeps_history: bool = False) -> None:
        self.now = 0.0
        self.pace = pace or Pace()
        self.current: Thread | None = None
        self.threads: list[Thread] = []
        self.is_over = False
        self.switches = 0
        self.history: list[str] | None = [] if keeps_history else None
        self._seed = seed
        self._order = self.stream("order")
        self._naps = self.stream("naps")
        self._ready: list[Thread] = []
        #: Heap of (time, number, thread to wake or function to call).
        self._timers: list[tuple[float, int, Thread | Callable[[], None]]] = []
        self._timer_count = 0
        self._switches_at_this_time = 0
        self._hub = greenlet.getcurrent()
        self._trace = hashlib.blake2b(digest_size=8)

    def stream(self, name: str) -> random.Random:
        """Return a source of chance that no other name shares."""
        return random.Random(f"{self._seed} {name}")

    @property
    def trace(self) -> str:
        """Digest of all switches and notes so far."""
        return self._trace.copy().hexdigest()

    def note(self, text: str) -> None:
        """Add an event to the trace."""
        self._trace.update(text.encode())
        if self.history is not None:
            self.history.append(f"{self.now:.6f} {self.current or '-'}: {text}")

    # threads

    def spawn(self, process: Process, name: str, work: Callable[[], object]) -> Thread:
        """Start a logical thread."""
        if self.is_over:
            raise AbandonedError
        thread = Thread(len(self.threads), name, process)
        self.threads.append(thread)

        def run() -> None:
            try:
                work()
            except (AbandonedError, greenlet.GreenletExit):
                pass
            finally:
                thread.is_done = True
                if not self.is_over:
                    for each in thread.end:
                        each()

        thread.green = greenlet.greenlet(run, self._hub)
        self.wake(thread)
        return thread

    def wake(self, thread: Thread) -> None:
        """Let a blocked thread run again."""
        if thread.is_ready or thread.is_done or not thread.process.is_alive:
            return
        thread.is_ready, thread.timer = True, 0
        (thread.process.waking if thread.process.is_frozen else self._ready).append(thread)

    def block(self, deadline: float | None = None, waits_for: str = "") -> None:
        """Park the current thread until ``wake`` or the deadline. The caller then checks its condition again."""
        if self.is_over:
            raise AbandonedError
        thread = self.current
        assert thread is not None, "the scheduler itself would block"
        thread.waits_for = waits_for
        if deadline is not None:
            self._timer_count += 1
            thread.timer = self._timer_count
            heapq.heappush(self._timers, (max(deadline, self.now), self._timer_count, thread))
        self._hub.switch()
        if self.is_over:
            raise AbandonedError

    def maybe_give_way(self) -> None:
        """Sometimes let other threads run first, or nap. Does nothing outside logical threads."""
        if self.is_over:
            raise AbandonedError
        thread = self.current
        if thread is None:
            return
        chance = self._naps.random()
        if chance < self.pace.nap:
            self.sleep(self._naps.random() * self.pace.nap_s)
        elif chance < self.pace.give_way:
            self.wake(thread)
            self._hub.switch()
            if self.is_over:
                raise AbandonedError

    def sleep(self, seconds: float) -> None:
        """Block the current thread for this long."""
        deadline = self.now + max(seconds, 0.0)
        while True:
            self.block(deadline, "sleep")
            if self.now >= deadline:
                return

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call a function after a delay in virtual seconds. The function must not block."""
        self._timer_count += 1
        heapq.heappush(self._timers, (self.now + seconds, self._timer_count, act))

    # processes

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does: none of its threads ever runs again."""
        if process.is_alive:
            process.is_alive = False
            self._ready = [thread for thread in self._ready if thread.process is not process]
            for each in process.on_death:
                each()

    def freeze(self, process: Process) -> None:
        """Stop a process as SIGSTOP does."""
        process.is_frozen = True
        process.waking += [thread for thread in self._ready if thread.process is process]
        self._ready = [thread for thread in self._ready if thread.process is not process]

    def thaw(self, process: Process) -> None:
        """Let a frozen process go on."""
        process.is_frozen = False
        if process.is_alive:
            self._ready += process.waking
        process.waking = []

    # the loop

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Run until the condition holds. Raises HangsError if it cannot hold any more, or not before ``limit_s``."""
        self._hub = greenlet.getcurrent()
        for thread in self.threads:
            if thread.green is not None and not thread.green.dead:
                thread.green.parent = self._hub
        while not until():
            if self._ready:
                self._switch()
            elif self._timers:
                self._advance()
                if self.now > limit_s:
                    raise HangsError(f"not done after {self.now:.0f} virtual seconds")
            else:
                raise HangsError("all threads wait for ever")

    def _switch(self) -> None:
        ready = self._ready
        place = self._order.randrange(len(ready)) if len(ready) > 1 else 0
        thread, ready[place] = ready[place], ready[-1]
        ready.pop()
        if thread.is_done or not thread.process.is_alive or thread.green is None:
            return
        thread.is_ready = False
        self.switches += 1
        self._switches_at_this_time += 1
        self._trace.update(b"%d@%.9f;" % (thread.number, self.now))
        if self._switches_at_this_time > _SWITCHES_LIMIT:
            raise HangsError(f"time does not advance at {self.now}: {thread}")
        self.current = thread
        before = places(thread) if self.history is not None else ""
        thread.green.switch()
        if self.history is not None:
            self.history.append(f"{self.now:.6f} {thread}: {before} -> {places(thread)}")
        self.current = None

    def _advance(self) -> None:
        at, number, what = heapq.heappop(self._timers)
        if isinstance(what, Thread) and (what.timer != number or what.is_done or not what.process.is_alive):
            return
        if at > self.now:
            self.now, self._switches_at_this_time = at, 0
        if isinstance(what, Thread):
            self.wake(what)
        else:
            what()

    def abandon(self) -> int:
        """End all threads that are left. Return how many would not end."""
        self.is_over = True
        left = 0
        for thread in self.threads:
            green = thread.green
            if green is None or green.dead:
                continue
            thread.is_done = True
            for _ in range(20):
                self.current = thread
                try:
                    green.throw(AbandonedError)
                except BaseException:  # noqa: BLE001 - whatever its cleaning up raises
                    continue
                if green.dead:
                    break
            left += not green.dead
        self.current = None
        return left

    # reports

    def waiting(self) -> Iterator[str]:
        """Describe each thread that is blocked: where, and on what."""
        for thread in self.threads:
            if thread.process.is_alive and not thread.is_done:
                state = " (frozen)" if thread.process.is_frozen else ""
                yield f"{thread}{state} waits for {thread.waits_for or 'another thread'}: {places(thread)}"


def places(thread: Thread, count: int = 3) -> str:
    """Return the innermost places of the product at which a thread is parked."""
    frame: FrameType | None = None if thread.green is None else thread.green.gr_frame
    found: list[str] = []
    while frame is not None and len(found) < count:
        package, mark, place = frame.f_code.co_filename.rpartition("/flightedl/")
        if package and mark:
            found.append(f"{place}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


class _Running:
    """Holds the scheduler of the seed that runs in this process; None while there is none."""

    scheduler: Scheduler | None = None


def running() -> Scheduler | None:
    """Return the scheduler of the current seed, or None."""
    return _Running.scheduler


def require_running() -> Scheduler:
    """Return the scheduler of the current seed."""
    assert _Running.scheduler is not None, "no seed is running"
    return _Running.scheduler


def set_running(scheduler: Scheduler | None) -> None:
    """Begin or end a seed."""
    _Running.scheduler = scheduler


def this_process() -> Process:
    """Return the simulated process that runs now."""
    current = require_running().current
    assert current is not None, "no process is running"
    return current.process
