"""Systematic scheduler: runs a small program of a few threads once for each order of its steps.

Threads of a program run one at a time. A thread can be interrupted before each operation of the named modules that
reads or writes shared state: an access to an attribute or an item, a call of a container's method, and every operation
on a lock, condition, event, queue or thread. By default a thread runs until it has to wait, and then the oldest one
that can runs. ``explore`` runs the program with every order that deviates from this at most ``deviations`` times. Most
races need one or two. A failure names its schedule, which ``replay`` repeats.

Time is virtual. It advances only when every thread waits, to the earliest time limit. So a lost wake-up shows as a wait
that ends by its time limit (``Run.now``), or as a deadlock. With ``early_timeouts``, a time limit may also pass while
other threads could run, which counts as a deviation.

A second deviation is explored only before operations that can matter: those on something that another thread was seen
to write, or to read if the operation writes. Attributes are told apart by their names.

The product's modules get their locks and threads from replaced ``threading`` and ``queue`` modules while a program is
explored. Not covered: threads inside C libraries, and operations that one bytecode performs atomically.
"""

from __future__ import annotations

import dis
import gc
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

from tests.support.planting import Planted, planted

#: A schedule: (decision, option) for each decision that differs from the default, which is to continue.
Schedule = tuple[tuple[int, int], ...]
Program = Callable[["Run"], None]

_WATCHDOG_S = 30.0
#: Decisions after which a program is considered never to end.
_ENDLESS = 20_000
#: Methods of containers and arrays, which access shared state in C.
_SHARED_METHODS = frozenset(
    {"add", "append", "appendleft", "clear", "copy", "count", "discard", "extend", "fill", "find", "get", "insert"}
    | {"items", "keys", "pop", "popitem", "popleft", "remove", "setdefault", "update", "values"}
)
#: Those that change nothing.
_READING_METHODS = frozenset({"copy", "count", "find", "get", "items", "keys", "values"})
#: Opcodes that access an item -> True if they change it.
_ITEM_ACCESS = {"BINARY_SUBSCR": False, "CONTAINS_OP": False, "STORE_SUBSCR": True, "DELETE_SUBSCR": True}
#: (name of the attribute or number of the lock, True if it is changed).
_Access = tuple[str, bool]
#: An access to something unknown, which may be anything.
_UNKNOWN: _Access = "?", True


class ScheduleError(AssertionError):
    """A schedule under which a program fails. The message names it and where its threads were interrupted."""

    def __init__(self, message: str, schedule: Schedule) -> None:
        super().__init__(message)
        self.schedule = schedule


class DeadlockError(AssertionError):
    """All threads wait without a time limit."""


class _AbandonedError(BaseException):
    """Ends a thread whose program is over."""


class _Task:
    """One thread of a program."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.go = threading.Lock()
        self.go.acquire()
        self.is_finished = False
        #: True once the wait's condition holds; None while the thread does not wait.
        self.is_ready: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.thread: threading.Thread | None = None

    def is_enabled(self, now: float) -> bool:
        if self.is_finished:
            return False
        if self.is_ready is None or self.is_ready():
            return True
        return self.deadline is not None and self.deadline <= now


class Run:
    """One execution of a program under one schedule."""

    def __init__(self, schedule: Schedule, codes: _Points, *, early_timeouts: bool) -> None:
        self._deviations = dict(schedule)
        self._codes = codes
        self._early_timeouts = early_timeouts
        self._tasks: list[_Task] = []
        self._current: _Task | None = None
        self._is_exploring = False
        self._is_abandoned = False
        self._is_over = threading.Event()
        self.error: BaseException | None = None
        #: Virtual time in seconds.
        self.now = 0.0
        #: For each decision: number of options, True if the thread has to wait, the thread, and its next access.
        self.decisions: list[tuple[int, bool, int, _Access]] = []
        #: (name, thread, True if it is changed) of all accesses.
        self.accesses: set[tuple[str, int, bool]] = set()
        self._primitives = self._steps = 0
        #: Called when the run is over.
        self.on_end: list[Callable[[], object]] = []
        #: Interruptions, for people.
        self.story: list[str] = []

    # for programs

    def threads(self, *works: Callable[[], object]) -> None:
        """Run these functions in threads of their own, in every order, and wait for them."""
        self._is_exploring = True
        started = [self.start(f"{number}", work) for number, work in enumerate(works)]
        self.block(lambda: all(task.is_finished for task in started), None)
        self._is_exploring = False

    def sleep(self, seconds: float) -> None:
        self.block(lambda: False, seconds)

    def point(self, access: _Access = _UNKNOWN) -> None:
        """Allow another thread to run now."""
        if self._is_abandoned:
            raise _AbandonedError
        if self._is_exploring:
            self._decide(None, access)
        else:
            self._count_step()

    def number_primitive(self) -> str:
        """Return a name for a lock or a similar object that is the same in all runs."""
        self._primitives += 1
        return f"#{self._primitives}"

    # for replaced primitives

    def block(self, is_ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until the condition holds. Return False if the time limit passed first."""
        if self._is_abandoned:
            raise _AbandonedError
        if is_ready():
            return True
        task = self.current
        task.is_ready = is_ready
        task.deadline = None if timeout_s is None else self.now + max(0.0, timeout_s)
        self._decide(None)
        task.is_ready = task.deadline = None
        return is_ready()

    def start(self, name: str, work: Callable[[], object]) -> _Task:
        task = _Task(len(self._tasks), name)
        self._tasks.append(task)
        task.thread = threading.Thread(target=self._work, args=(task, work), daemon=True)
        task.thread.start()
        return task

    @property
    def current(self) -> _Task:
        assert self._current is not None
        return self._current

    @property
    def is_abandoned(self) -> bool:
        return self._is_abandoned

    # for explore

    def execute(self, program: Program) -> None:
        main = self.start("main", lambda: self._main(program))
        self._current = main
        main.go.release()
        if not self._is_over.wait(_WATCHDOG_S):
            frames = sys._current_frames()
            where = [frames.get(task.thread.ident or 0) for task in self._tasks if task.thread is not None]
            places = [_place_of(frame) for frame in where if frame is not None]
            raise AssertionError(f"a thread is blocked outside of the scheduler: {places}")
        self._is_abandoned = True
        for task in self._tasks:
            assert task.thread is not None
            if not task.is_finished:
                self._current = task
                task.go.release()
            task.thread.join(_WATCHDOG_S)
        for end in self.on_end:
            end()

    def _main(self, program: Program) -> None:
        try:
            program(self)
        except Exception as error:  # noqa: BLE001 - reported by explore
            self._fail(error)
        self._is_exploring = False
        if not self._is_abandoned:
            self._is_over.set()
            # Keep the other threads where they are until ``execute`` ends them one by one.
            self.current.go.acquire()

    def _work(self, task: _Task, work: Callable[[], object]) -> None:
        task.go.acquire()
        sys.settrace(self._trace)
        try:
            if not self._is_abandoned:
                work()
                # A thread is alive for a moment after its last statement.
                self.point()
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001 - reported by explore
            self._fail(error)
        finally:
            sys.settrace(None)
            task.is_finished = True
            if not self._is_abandoned:
                self._decide(None)

    def _fail(self, error: BaseException) -> None:
        if self.error is None and not self._is_abandoned:
            self.error = error
        if not self._is_over.is_set():
            self._is_over.set()

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event != "call" or self._is_abandoned:
            return None
        offsets = self._codes.of(frame.f_code)
        if not offsets:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def local(frame: FrameType, event: str, _arg: object) -> Any:
            if event == "opcode" and self._is_exploring and not self._is_abandoned:
                access = offsets.get(frame.f_lasti)
                if access is not None:
                    self._decide(frame, access)
            return local

        return local

    def _decide(self, frame: FrameType | None, access: _Access = _UNKNOWN) -> None:
        """Choose the thread that runs next, and switch to it."""
        if self._is_over.is_set():
            return self._stay_abandoned()
        current = self.current
        if self._is_exploring:
            self.accesses.add((access[0], current.number, access[1]))
        options = self._options()
        self._count_step()
        if not options:
            waiting = ", ".join(task.name for task in self._tasks if not task.is_finished)
            self._fail(DeadlockError(f"these threads wait for ever: {waiting}"))
            return self._stay_abandoned()
        option = 0
        if len(options) > 1 and self._is_exploring:
            option = self._deviations.get(len(self.decisions), 0)
            self.decisions.append((len(options), options[0] is not current, current.number, access))
            if option >= len(options):
                self._fail(AssertionError("the program is not deterministic"))
                return self._stay_abandoned()
        chosen = options[option]
        if option:
            self.story.append(f"{current.name} ({'' if frame is None else _place_of(frame)}) -> {chosen.name}")
        self._switch_to(chosen)
        return None

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > _ENDLESS:
            self._fail(AssertionError("the program does not end"))
            self._stay_abandoned()

    def _options(self) -> list[_Task]:
        """Return the threads that can run now, starting with the current one. If there are none, let time pass."""
        current, now = self.current, self.now
        others = [task for task in self._tasks if task is not current]
        options = [task for task in (current, *others) if task.is_enabled(now)]
        timed = [task for task in self._tasks if task.deadline is not None and not task.is_enabled(now)]
        if not options:
            return sorted(timed, key=lambda task: task.deadline or 0.0)[:1]
        return options + timed if self._early_timeouts and self._is_exploring else options

    def _switch_to(self, chosen: _Task) -> None:
        current = self.current
        if not chosen.is_enabled(self.now):
            assert chosen.deadline is not None
            self.now = chosen.deadline
        if chosen is not current:
            self._current = chosen
            chosen.go.release()
            if not current.is_finished:
                current.go.acquire()
        if self._is_abandoned and not current.is_finished:
            raise _AbandonedError

    def _stay_abandoned(self) -> None:
        """Wait for ``execute`` to end this thread."""
        task = self.current
        if not task.is_finished:
            task.go.acquire()
            raise _AbandonedError


class _Points:
    """Offsets of bytecodes of some modules before which a thread can be interrupted."""

    def __init__(self, modules: Sequence[ModuleType]) -> None:
        self._files = {module.__file__ for module in modules}
        self._accesses: dict[CodeType, dict[int, _Access]] = {}

    def of(self, code: CodeType) -> dict[int, _Access]:
        found = self._accesses.get(code)
        if found is None:
            is_covered = code.co_filename in self._files and code.co_name != "__init__"
            found = self._accesses[code] = dict(_accesses(code)) if is_covered else {}
        return found


def _accesses(code: CodeType) -> Iterator[tuple[int, _Access]]:
    instructions = list(dis.get_instructions(code))
    for place, instruction in enumerate(instructions):
        name, argument = instruction.opname, instruction.argval
        after = instructions[place + 1].opname if place + 1 < len(instructions) else ""
        if name in _ITEM_ACCESS or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            yield instruction.offset, ("?", _ITEM_ACCESS.get(name, False))
        elif name in {"STORE_ATTR", "DELETE_ATTR"}:
            yield instruction.offset, (argument, True)
        elif name in {"LOAD_ATTR", "LOAD_METHOD"}:
            is_method = name == "LOAD_METHOD" or instruction.argrepr.startswith("NULL|")
            if argument in _SHARED_METHODS:
                before = instructions[place - 1]
                of = before.argval if before.opname == "LOAD_ATTR" else "?"
                yield instruction.offset, (of, argument not in _READING_METHODS)
            # An attribute whose attribute follows is an object, such as a lock, that is never replaced.
            elif not is_method and after not in {"LOAD_ATTR", "LOAD_METHOD"}:
                yield instruction.offset, (argument, False)


def _place_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_qualname}"


# replaced primitives


_running: Run | None = None


def running() -> Run:
    """Return the run that is being executed."""
    assert _running is not None, "no program is being explored"
    return _running


class Lock:
    """Replaces ``threading.Lock`` and, if reentrant, ``threading.RLock``."""

    is_reentrant = False

    def __init__(self) -> None:
        self._holder: _Task | None = None
        self._count = 0
        self.access = running().number_primitive(), True

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        run = running()
        if run.is_abandoned:
            raise _AbandonedError
        run.point(self.access)
        if self.is_reentrant and self._holder is run.current:
            self._count += 1
            return True
        if self._holder is not None:
            if not blocking:
                return False
            if not run.block(lambda: self._holder is None, None if timeout < 0 else timeout):
                return False
        self._holder, self._count = run.current, 1
        return True

    def release(self) -> None:
        if running().is_abandoned:
            return
        assert self._holder is not None, "a lock is released that nobody holds"
        self._count -= 1
        if not self._count:
            self._holder = None
            running().point(self.access)

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    is_reentrant = True


class Semaphore:
    """Replaces ``threading.Semaphore`` and ``threading.BoundedSemaphore``."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._access = running().number_primitive(), True

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        running().point(self._access)
        if not running().block(lambda: self._value > 0, timeout if blocking else 0.0):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        if not running().is_abandoned:
            running().point(self._access)
        self._value += n

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """Replaces ``threading.Condition``."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: list[list[bool]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        assert self._lock._holder is running().current, "a thread waits without the condition's lock"
        token = [False]
        self._waiters.append(token)
        count, self._lock._count, self._lock._holder = self._lock._count, 0, None
        is_notified = running().block(lambda: token[0], timeout)
        if token in self._waiters:
            self._waiters = [each for each in self._waiters if each is not token]
        running().block(lambda: self._lock._holder is None, None)
        self._lock._holder, self._lock._count = running().current, count
        return is_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else running().now + timeout
        while not (result := predicate()):
            left_s = None if end is None else end - running().now
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        if running().is_abandoned:
            return
        assert self._lock._holder is running().current, "a condition is notified without its lock"
        for token in self._waiters[:n]:
            token[0] = True
        del self._waiters[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """Replaces ``threading.Event``."""

    def __init__(self) -> None:
        self._is_set = False
        self._name = running().number_primitive()

    def is_set(self) -> bool:
        running().point((self._name, False))
        return self._is_set

    def set(self) -> None:
        if not running().is_abandoned:
            running().point((self._name, True))
        self._is_set = True

    def clear(self) -> None:
        running().point((self._name, True))
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        running().point((self._name, False))
        return running().block(lambda: self._is_set, timeout)


class Thread:
    """Replaces ``threading.Thread``."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "",
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name = name
        self._task: _Task | None = None

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number + 1

    def start(self) -> None:
        assert self._target is not None
        work = self._target
        self._task = running().start(self.name, lambda: work(*self._args, **self._kwargs))
        _threads[self._task] = self
        running().point()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_finished

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None, "a thread is joined that was not started"
        running().point()
        running().block(lambda: task.is_finished, timeout)


_threads: dict[_Task, Thread] = {}


class SimpleQueue:
    """Replaces ``queue.SimpleQueue`` and ``queue.Queue`` without a limit."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._access = running().number_primitive(), True

    def put(self, item: Any) -> None:
        running().point(self._access)
        self._items.append(item)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        running().point(self._access)
        if not running().block(lambda: bool(self._items), timeout if block else 0.0):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        running().point(self._access)
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


def _current_thread() -> object:
    return _threads.get(running().current, running().current)


class VirtualClock:
    """A clock that shows the virtual time."""

    def now(self) -> float:
        return running().now

    def wall_time(self) -> float:
        return running().now

    def sleep(self, seconds: float) -> None:
        running().sleep(seconds)


@contextmanager
def _replaced() -> Iterator[None]:
    """Replace ``threading`` and ``queue`` in all modules of the product."""
    fakes = {threading: ModuleType("threading"), queue: ModuleType("queue")}
    fakes[threading].__dict__.update(
        Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Thread=Thread, current_thread=_current_thread
    )
    fakes[threading].__dict__.update(Semaphore=Semaphore, BoundedSemaphore=Semaphore)
    fakes[threading].__dict__.update(get_ident=lambda: running().current.number + 1, local=threading.local)
    fakes[queue].__dict__.update(SimpleQueue=SimpleQueue, Queue=SimpleQueue, Empty=queue.Empty, Full=queue.Full)
    replaced = [
        (module, name, real)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("flightedl.")
        for name, real in (("threading", threading), ("queue", queue))
        if getattr(module, name, None) is real
    ]
    for module, name, real in replaced:
        setattr(module, name, fakes[real])
    try:
        yield
    finally:
        for module, name, real in replaced:
            setattr(module, name, real)


# exploration


@dataclass
class Explored:
    """Result of an exploration."""

    schedules: int = 0
    #: True if every schedule within the bound was run.
    is_complete: bool = True
    error: ScheduleError | None = field(default=None)


def explore(
    program: Program,
    modules: Sequence[ModuleType],
    *,
    deviations: int = 2,
    limit: int = 20_000,
    early_timeouts: bool = False,
) -> Explored:
    """Run the program under every schedule with at most ``deviations`` deviations, the fewest first.

    Args:
        program: Creates its objects, calls ``Run.threads`` once, and asserts its invariant.
        modules: Modules in whose functions threads can be interrupted between any two operations.
        deviations: Maximum number of deviations.
        limit: Maximum number of schedules.
        early_timeouts: See the module.

    Raises:
        ScheduleError: The program fails under a schedule.
    """
    found = first_failure(program, modules, deviations=deviations, limit=limit, early_timeouts=early_timeouts)
    if found.error is not None:
        raise found.error
    return found


def first_failure(
    program: Program,
    modules: Sequence[ModuleType],
    *,
    deviations: int = 2,
    limit: int = 20_000,
    early_timeouts: bool = False,
) -> Explored:
    """Explore as ``explore`` does, until a schedule fails. Return the failure instead of raising it."""
    found = Explored()
    codes = _Points(modules)
    levels: list[deque[Schedule]] = [deque() for _ in range(deviations + 1)]
    levels[0].append(())
    seen = _Accesses()
    with _replaced(), _undisturbed():
        for level, waiting in enumerate(levels):
            done: list[tuple[Schedule, list[tuple[int, bool, int, _Access]]]] = []
            while waiting:
                if found.schedules == limit:
                    found.is_complete = False
                    return found
                schedule = waiting.popleft()
                run = _executed(program, schedule, codes, early_timeouts=early_timeouts)
                found.schedules += 1
                if run.error is not None:
                    found.error = _failure(run, schedule)
                    return found
                seen.add(run.accesses)
                done.append((schedule, run.decisions))
            if level < deviations:
                for schedule, decisions in done:
                    levels[level + 1] += _after(schedule, decisions, seen if level else None)
    return found


class _Accesses:
    """Accesses of all runs so far."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, bool], set[int]] = {}

    def add(self, accesses: set[tuple[str, int, bool]]) -> None:
        for name, thread, is_change in accesses:
            for each in (name, "*"):
                self._of.setdefault((each, is_change), set()).add(thread)

    def conflict(self, thread: int, access: _Access) -> bool:
        """Return True if the order of this access and one of another thread can matter."""
        name, is_change = access
        names = ("*",) if name == "?" else (name, "?")
        kinds = (True, False) if is_change else (True,)
        return any(self._of.get((each, kind), set()) - {thread} for each in names for kind in kinds)


def _after(
    schedule: Schedule,
    decisions: Sequence[tuple[int, bool, int, _Access]],
    seen: _Accesses | None,
) -> Iterator[Schedule]:
    """Yield the schedules that differ in one later decision as well."""
    first = schedule[-1][0] + 1 if schedule else 0
    for number in range(first, len(decisions)):
        options, must_wait, thread, access = decisions[number]
        if must_wait or seen is None or seen.conflict(thread, access):
            for option in range(1, options):
                yield (*schedule, (number, option))


def replay(
    program: Program, modules: Sequence[ModuleType], schedule: Schedule, *, early_timeouts: bool = False
) -> None:
    """Run the program under one schedule. Raises ScheduleError if it fails."""
    with _replaced(), _undisturbed():
        run = _executed(program, schedule, _Points(modules), early_timeouts=early_timeouts)
    if run.error is not None:
        raise _failure(run, schedule)


def _executed(program: Program, schedule: Schedule, codes: _Points, *, early_timeouts: bool) -> Run:
    global _running  # noqa: PLW0603
    _running = run = Run(schedule, codes, early_timeouts=early_timeouts)
    try:
        run.execute(program)
    finally:
        _running = None
        _threads.clear()
    return run


def _failure(run: Run, schedule: Schedule) -> ScheduleError:
    text = f"{type(run.error).__name__}: {run.error}\nschedule {schedule}\n" + "\n".join(run.story)
    error = ScheduleError(text, schedule)
    error.__cause__ = run.error
    return error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Do not collect garbage, which would run finalizers at different moments of each run. Log nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        if was_enabled:
            gc.enable()


def finds(
    flaw: Planted, program: Program, modules: Sequence[ModuleType], *, limit: int = 10_000, **bounds: Any
) -> ScheduleError:
    """Return the failure that exploration finds in the product with a planted bug. Fails if it finds none."""
    replay(program, modules, ())
    with planted([flaw]):
        found = first_failure(program, modules, limit=limit, **bounds)
        assert found.error is not None, f"not found in {found.schedules} schedules: {flaw.what}"
        with pytest.raises(ScheduleError):
            replay(program, modules, found.error.schedule, early_timeouts=bounds.get("early_timeouts", False))
    return found.error
