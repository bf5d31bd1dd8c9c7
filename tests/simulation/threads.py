"""Fakes of ``_thread``, ``time``, ``uuid`` and ``secrets``, on which the product's threads run in virtual time.

``threading``, ``queue`` and ``concurrent.futures`` are not imitated: the standard library's own source is executed once
more, with these fakes in place of the C modules. So conditions, events, queues and pools are the real ones.

A lock that is created while no thread runs belongs to a module of the product. Simulated processes share modules, so
such a lock has a state for each process; otherwise a killed process would leave it locked for all others.
"""

from __future__ import annotations

import builtins
import importlib.util
import itertools
import queue as real_queue
import random
import sys
import time as real_time
import types
import uuid as real_uuid
from collections.abc import Callable, Mapping
from typing import Any, Self

from tests.simulation.scheduler import Process, Thread, require_running, running, this_process

#: Virtual time begins this long after the boot of the machines, which began this long after 1970.
_BOOT_S = 1000.0
_EPOCH_S = 1.7e9
#: Thread idents below this one are not those of simulated threads.
_IDENTS = 1000


class Lock:
    """A lock of ``_thread``. Acquiring it is where threads give way."""

    __slots__ = ("__weakref__", "_by_process", "_is_locked", "_waiters")

    def __init__(self) -> None:
        scheduler = running()
        is_of_module = scheduler is None or scheduler.current is None
        #: Locks of the processes if this one belongs to a module.
        self._by_process: dict[Process, Lock] | None = {} if is_of_module else None
        self._is_locked = False
        self._waiters: list[Thread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = running()
        if scheduler is None or scheduler.current is None:
            was_free, self._is_locked = not self._is_locked, True
            return was_free
        if self._by_process is not None:
            return self._of_process(self._by_process).acquire(blocking, timeout)
        scheduler.maybe_give_way()
        deadline = None if timeout < 0 else scheduler.now + timeout
        while self._is_locked:
            if not blocking or (deadline is not None and scheduler.now >= deadline):
                return False
            thread = scheduler.current
            self._waiters.append(thread)
            try:
                scheduler.block(deadline, "lock")
            finally:
                if thread in self._waiters:
                    self._waiters.remove(thread)
        self._is_locked = True
        return True

    __enter__ = acquire

    def release(self) -> None:
        scheduler = running()
        if scheduler is not None and scheduler.current is not None and self._by_process is not None:
            self._of_process(self._by_process).release()
            return
        if not self._is_locked:
            if scheduler is None or scheduler.is_over:
                return
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        while self._waiters:
            thread = self._waiters.pop(0)
            if thread.process.is_alive and not thread.is_done:
                require_running().wake(thread)
                break

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        scheduler = running()
        if self._by_process is not None and scheduler is not None and scheduler.current is not None:
            return self._of_process(self._by_process)._is_locked
        return self._is_locked

    def _at_fork_reinit(self) -> None:
        self._is_locked = False

    def _of_process(self, locks: dict[Process, Lock]) -> Lock:
        process = this_process()
        if process not in locks:
            locks[process] = Lock()
        return locks[process]


def get_ident() -> int:
    """Return the number of the current thread."""
    scheduler = running()
    return 1 if scheduler is None or scheduler.current is None else scheduler.current.number + _IDENTS


#: Key of a thread's sentinel among its thread-local values.
_SENTINEL = -1


def start_new_thread(function: Callable[..., object], args: tuple[Any, ...], kwargs: Any = None) -> int:
    """Start a logical thread in the current process."""
    owner = getattr(function, "__self__", None)
    name = getattr(owner, "name", "") or "thread"
    thread = require_running().spawn(this_process(), name, lambda: function(*args, **(kwargs or {})))

    def end() -> None:
        lock = thread.locals.pop(_SENTINEL, {}).get("lock")
        if isinstance(lock, Lock) and lock.locked():
            lock.release()

    thread.end.append(end)
    return thread.number + _IDENTS


def _set_sentinel() -> Lock:
    """Return a lock that is released when the current thread ends."""
    lock = Lock()
    scheduler = running()
    if scheduler is not None and scheduler.current is not None:
        scheduler.current.locals[_SENTINEL] = {"lock": lock}
    return lock


class Handle:
    """``_thread._ThreadHandle`` of Python 3.13 and later: knows whether a thread has ended, and waits for its end."""

    __slots__ = ("_is_done", "_running", "ident")

    def __init__(self, ident: int = 0) -> None:
        self.ident = ident
        self._is_done = False
        #: Locked while the thread runs.
        self._running = Lock()

    def is_done(self) -> bool:
        return self._is_done

    def join(self, timeout: float | None = None) -> None:
        if self._running.acquire(timeout=-1 if timeout is None else timeout):
            self._running.release()

    def start(self, function: Callable[..., object]) -> None:
        self._running.acquire()
        self.ident = start_new_thread(function, ())
        require_running().threads[self.ident - _IDENTS].end.append(self._end)

    def _end(self) -> None:
        self._is_done = True
        self._running.release()


def start_joinable_thread(function: Callable[..., object], handle: Handle | None = None, daemon: bool = True) -> Handle:
    """Start a logical thread in the current process, and return its handle."""
    handle = handle or Handle()
    handle.start(function)
    return handle


_local_count = itertools.count(1)
_locals_outside: dict[int, dict[str, object]] = {}


class Local:
    """``threading.local`` of logical threads."""

    __slots__ = ("__dict__", "__weakref__", "_number")

    _number: int

    def __new__(cls, *_: object, **__: object) -> Self:
        self = object.__new__(cls)
        object.__setattr__(self, "_number", next(_local_count))
        return self

    def __getattribute__(self, name: str) -> Any:
        scheduler = running()
        current = None if scheduler is None else scheduler.current
        values = _locals_outside if current is None else current.locals
        number = object.__getattribute__(self, "_number")
        object.__setattr__(self, "__dict__", values.setdefault(number, {}))
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        Local.__getattribute__(self, "__dict__")
        object.__setattr__(self, name, value)


def _module(name: str, base: types.ModuleType | None = None, **names: object) -> types.ModuleType:
    """Return a module with the public names of another one, and these."""
    made = types.ModuleType(name)
    if base is not None:
        made.__dict__.update({each: value for each, value in vars(base).items() if not each.startswith("__")})
    made.__dict__.update(names)
    return made


def now_s(*_: object) -> float:
    """Return the time since the boot of the machines."""
    scheduler = running()
    return _BOOT_S + (0.0 if scheduler is None else scheduler.now)


def wall_s() -> float:
    """Return the wall clock of the current process."""
    scheduler = running()
    offset_s = 0.0 if scheduler is None or scheduler.current is None else this_process().wall_offset_s
    return _EPOCH_S + now_s() + offset_s


def _sleep(seconds: float) -> None:
    scheduler = running()
    if scheduler is None or scheduler.current is None:
        real_time.sleep(seconds)
    else:
        scheduler.sleep(seconds)


def _bits(count: int) -> int:
    """Return random bits for names. Those of each seed begin again."""
    scheduler = running()
    return (_ids if scheduler is None else _ids_of(scheduler)).getrandbits(count)


_ids = random.Random(0)
_ids_by_seed: dict[int, random.Random] = {}


def _ids_of(scheduler: object) -> random.Random:
    number = id(scheduler)
    if number not in _ids_by_seed:
        _ids_by_seed.clear()
        _ids_by_seed[number] = require_running().stream("ids")
    return _ids_by_seed[number]


def _copy_of(name: str, replaced: Mapping[str, types.ModuleType]) -> types.ModuleType:
    """Execute a standard module's own source again, with other modules in place of some that it imports."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"there is no module {name}"
    assert spec.loader is not None, f"{name} cannot be loaded"
    module = types.ModuleType(name)
    module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
    real_import = builtins.__import__

    def importing(what: str, *arguments: Any, **more: Any) -> Any:
        level = arguments[3] if len(arguments) > 3 else more.get("level", 0)
        return replaced[what] if level == 0 and what in replaced else real_import(what, *arguments, **more)

    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": importing}
    code = spec.loader.get_code(name)  # type: ignore[attr-defined] # all loaders of the standard library have it
    exec(code, module.__dict__)  # the standard library's own source
    return module


def _number(kind: Any) -> None:
    """Hash the instances of a class by consecutive numbers. By default, hashes depend on addresses."""
    numbers = itertools.count(1)
    kind.__hash__ = lambda self: self.__dict__.setdefault("_simulated_hash", next(numbers))


def _threading() -> types.ModuleType:
    """Return ``threading`` on logical threads, with an excepthook for each process."""
    made = _copy_of("threading", {"_thread": fake_thread, "time": fake_time})
    # Pools keep their threads in sets, whose order depends on hashes.
    _number(made.Thread)
    usual = made.excepthook

    class _PerProcess(types.ModuleType):
        """``threading``, whose excepthook belongs to the process that sets it."""

        @property
        def excepthook(self) -> Any:
            scheduler = running()
            own = None if scheduler is None or scheduler.current is None else this_process().excepthook
            return own or usual

        @excepthook.setter
        def excepthook(self, hook: Any) -> None:
            this_process().excepthook = hook

    del made.__dict__["excepthook"]
    made.__class__ = _PerProcess

    def invoke(thread: Any) -> None:
        made.excepthook(made.ExceptHookArgs([*sys.exc_info(), thread]))

    made.__dict__["_make_invoke_excepthook"] = lambda: invoke
    return made


fake_thread = _module(
    "_thread",
    allocate_lock=Lock,
    LockType=Lock,
    get_ident=get_ident,
    get_native_id=get_ident,
    start_new_thread=start_new_thread,
    start_joinable_thread=start_joinable_thread,
    _ThreadHandle=Handle,
    _make_thread_handle=Handle,
    _get_main_thread_ident=get_ident,
    _shutdown=lambda: None,
    _set_sentinel=_set_sentinel,
    error=RuntimeError,
    TIMEOUT_MAX=1e9,
    _local=Local,
    stack_size=lambda *_: 0,
    daemon_threads_allowed=lambda: True,
    _is_main_interpreter=lambda: True,
)
fake_time = _module(
    "time",
    real_time,
    monotonic=now_s,
    perf_counter=now_s,
    clock_gettime=now_s,
    process_time=lambda: 0.0,
    thread_time=lambda: 0.0,
    time=wall_s,
    monotonic_ns=lambda: int(now_s() * 1e9),
    perf_counter_ns=lambda: int(now_s() * 1e9),
    time_ns=lambda: int(wall_s() * 1e9),
    sleep=_sleep,
)
fake_uuid = _module("uuid", real_uuid, uuid4=lambda: real_uuid.UUID(int=_bits(128), version=4))
fake_secrets = _module(
    "secrets",
    token_hex=lambda count=32: f"{_bits(8 * count):0{2 * count}x}",
    token_bytes=lambda count=32: _bits(8 * count).to_bytes(count, "big"),
)
fake_threading = _threading()
fake_queue = _copy_of("queue", {"threading": fake_threading, "time": fake_time, "_queue": types.ModuleType("_queue")})
# Modules that use the real queue catch these.
fake_queue.__dict__.update(Empty=real_queue.Empty, Full=real_queue.Full)
_base = _copy_of("concurrent.futures._base", {"threading": fake_threading, "time": fake_time})
_number(_base.Future)
# Futures are locked in this order.
_base.__dict__["id"] = hash
fake_futures = _module("concurrent.futures", _base, _base=_base)
_pool = _copy_of(
    "concurrent.futures.thread",
    {"threading": fake_threading, "queue": fake_queue, "concurrent.futures": fake_futures},
)
fake_futures.__dict__["ThreadPoolExecutor"] = _pool.ThreadPoolExecutor

#: What the product imports in place of the standard library's modules.
REPLACED: Mapping[str, types.ModuleType] = {
    "_thread": fake_thread,
    "concurrent.futures": fake_futures,
    "concurrent.futures.thread": _pool,
    "queue": fake_queue,
    "secrets": fake_secrets,
    "threading": fake_threading,
    "time": fake_time,
    "uuid": fake_uuid,
}
