"""Settings that make Flight fast, for processes whose launcher did not start them with these settings.

There are three settings. Together they raise a 64 MB push and pull on loopback from 0.48 to 0.71 of the reference:

* glibc's allocator keeps freed memory up to 1 GiB instead of returning every received buffer to the kernel and faulting
  it in again. ``mallopt`` sets this in a running process, for all threads. All threads share one arena: with 8
  trainers, the threads of a pserver would otherwise keep 300 MB more.
* gRPC's experiments with larger TCP frames are enabled. gRPC reads the variable once, on first use, so it must be in
  the environment before pyarrow.flight is imported: :mod:`flightedl.rpc.arrow_flight` ensures that.
* One more experiment, only for Flight's clients: their threads themselves wait for their sockets, as they did before
  gRPC's *event engine*, instead of being woken by another thread for each piece of a message (12 % less time). grpcio,
  used by the etcd client, has its own gRPC, which reads the same variable but must not use this experiment: calls that
  etcd aborts would have an unknown outcome. So it is in the environment only while pyarrow's gRPC reads it.

glibc reads the setting for large copies (``tuned_environment``) at program start, so it affects only processes started
with it.

A server does not load some libraries at all (``leave_out_pandas_and_scipy``), a trainer loads them only on demand
(``defer_pandas``), and a pserver does not preempt running threads (``avoid_preemption``).

Variables already in the environment are never overridden. Without glibc (macOS, musl) the allocator is not changed. The
cost is memory: a process returns only free heap in excess of 1 GiB.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from flightedl.config import tuned_environment

GRPC_EXPERIMENTS = "GRPC_EXPERIMENTS"
_FOR_FLIGHT_ALONE = "-event_engine_client"
#: Address for a client that never connects.
_NOWHERE = "grpc://127.0.0.1:1"
_HEAVY = frozenset({"pandas", "scipy"})
#: numba imports coverage, if installed, to measure compiled code.
_LEFT_OUT = _HEAVY | {"coverage"}

#: glibc's mallopt parameter for each variable (malloc.h).
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}


def apply() -> tuple[bool, bool]:
    """Tune this process. Call it first in ``main`` or ``connect``; calling it again is harmless.

    Returns:
        True if the allocator is tuned, and True if gRPC is. The platform or the import order may prevent it.
    """
    tuned = _tune_allocator(), set_grpc_experiments()
    if os.environ.get(GRPC_EXPERIMENTS) == tuned_environment()[GRPC_EXPERIMENTS]:
        _let_flight_read(_FOR_FLIGHT_ALONE)
    return tuned


def allow_many_connections(wanted: int = 65_536) -> int:
    """Raise the limit on open files and sockets as far as the system allows, and return the new limit.

    The usual limit of 1,024 is too low for a server: each trainer has two connections, and unauthorized clients may
    open some.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    may = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= may:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (may, hard))
    return may


class _LeftOut(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:  # noqa: ARG002
        if fullname in _LEFT_OUT:
            raise ModuleNotFoundError(f"a server of flightedl does without {fullname}", name=fullname)


def leave_out_pandas_and_scipy() -> bool:
    """Keep pyarrow from loading pandas and numba from loading scipy, if these are installed.

    pandas takes half a second of a server's start, and 30 MB; scipy takes 15 MB. Use it only in processes that need
    neither, before pyarrow creates an array. Returns False if one is already loaded.
    """
    if any(name in sys.modules for name in _HEAVY):
        return False
    if not any(isinstance(finder, _LeftOut) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LeftOut())
    return True


class _Awaited(MetaPathFinder):
    """Finder that makes pyarrow detect pandas when a program imports it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - of importlib's
        target: ModuleType | None = None,  # noqa: ARG002 - likewise
    ) -> ModuleSpec | None:
        if fullname != "pandas":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader)
        return spec


class _Telling(Loader):
    """Loader that delegates to pandas' own loader, and then makes pyarrow look for pandas again."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        from pyarrow import lib

        # This access must succeed; pyarrow then forgets that pandas was missing.
        _ = lib._pandas_api.pd  # noqa: SLF001 - pyarrow has no other word for it


def defer_pandas() -> bool:
    """Keep pyarrow from importing pandas until the program itself imports it, or requests a data frame.

    pyarrow imports pandas with the first array that it creates or reads, to check if the data comes from pandas. It
    cannot before the program imports pandas, so trainers start half a second faster. False if pandas is already loaded.
    """
    if "pandas" in sys.modules:
        return False
    if not any(isinstance(finder, _Awaited) for finder in sys.meta_path):
        import pyarrow as pa

        absent = _LeftOut()
        sys.meta_path.insert(0, absent)
        try:
            pa.array([0])
        finally:
            sys.meta_path.remove(absent)
        sys.meta_path.insert(0, _Awaited())
    return True


def avoid_preemption() -> bool:
    """Ask Linux not to preempt a running thread when a thread of this process wakes up (``SCHED_BATCH``).

    Otherwise, an arriving message would interrupt a thread that works on another message, whose data is in the cache.
    With 64 MB, a step takes 5 % less time. Threads started later inherit the policy. A thread that wakes up waits for
    at most one time slice, a few milliseconds. If other processes keep all processors busy, a step takes 5 % longer.

    Returns:
        False if this is not Linux, if it is not permitted, or if the process was given another policy.
    """
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):
        return False
    return True


def set_grpc_experiments() -> bool:
    """Put gRPC's experiments into the environment. False if gRPC was already loaded without them."""
    if os.environ.get(GRPC_EXPERIMENTS):
        return True
    if "pyarrow._flight" in sys.modules:
        return False
    os.environ[GRPC_EXPERIMENTS] = tuned_environment()[GRPC_EXPERIMENTS]
    return True


def _let_flight_read(more: str) -> None:
    """Make pyarrow's gRPC read its experiments now, including ``more``, by creating its first client."""
    usual = os.environ[GRPC_EXPERIMENTS]
    os.environ[GRPC_EXPERIMENTS] = f"{usual},{more}"
    try:
        from pyarrow import flight

        flight.FlightClient(_NOWHERE).close()
    finally:
        os.environ[GRPC_EXPERIMENTS] = usual


def _tune_allocator() -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    wanted = tuned_environment()
    missing = [name for name in _MALLOPT if name not in os.environ]
    return 0 not in [mallopt(_MALLOPT[name], int(wanted[name])) for name in missing]
