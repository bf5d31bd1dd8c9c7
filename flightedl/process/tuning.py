"""Settings that make Flight fast. They are applied here in processes that were started without them.

Three settings together raise the speed of a 64 MB push and pull on loopback from 0.48 to 0.71 of the reference:

* glibc's allocator keeps up to 1 GiB of freed memory, instead of returning every received buffer to the kernel and
  faulting it in again. ``mallopt`` sets this in a running process, for all threads. All threads share one arena;
  otherwise, with 8 trainers, the threads of a pserver would keep 300 MB more.
* gRPC's experiments with larger TCP frames are enabled. gRPC reads the environment variable only once, at first use, so
  the variable must be set before pyarrow.flight is imported. :mod:`flightedl.rpc.arrow_flight` ensures that.
* Another experiment applies only to Flight's clients: each thread waits for its own socket, as before gRPC had an
  *event engine*, instead of being woken by another thread for each piece of a message. This takes 12% less time.
  grpcio, which the etcd client uses, contains another copy of gRPC, which reads the same variable. It must not use this
  experiment, because calls that etcd aborts would then have an unknown outcome. So the variable names the experiment
  only while pyarrow's gRPC reads it.

glibc reads the setting for large copies (``tuned_environment``) only when a program starts, so it affects only
processes that are started with it.

Servers never load certain libraries (``leave_out_pandas_and_scipy``), trainers load them only on demand
(``defer_pandas``), and pservers do not preempt running threads (``avoid_preemption``).

Variables that are already set in the environment are never overridden. Without glibc (macOS, musl), the allocator is
not changed. The settings cost memory: a process keeps up to 1 GiB of free heap memory.
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
#: Address used by a client that never connects.
_NOWHERE = "grpc://127.0.0.1:1"
_HEAVY = frozenset({"pandas", "scipy"})
#: If coverage is installed, numba imports it to measure compiled code.
_LEFT_OUT = _HEAVY | {"coverage"}

#: Variable -> glibc's parameter of mallopt (malloc.h).
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}


def apply() -> tuple[bool, bool]:
    """Tune this process. Must be the first call in ``main`` or ``connect``; repeated calls are harmless.

    Returns:
        True if the allocator is tuned, and True if gRPC is tuned. The platform or the import order may prevent either.
    """
    tuned = _tune_allocator(), set_grpc_experiments()
    if os.environ.get(GRPC_EXPERIMENTS) == tuned_environment()[GRPC_EXPERIMENTS]:
        _let_flight_read(_FOR_FLIGHT_ALONE)
    return tuned


def allow_many_connections(wanted: int = 65_536) -> int:
    """Raise the limit on open files and sockets as far as the system permits. Return the new limit.

    The usual limit of 1,024 is too low for a server: each trainer has two connections, and unauthorized clients may
    open some, too.
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
    """Prevent pyarrow from loading pandas, and numba from loading scipy, if they are installed.

    pandas takes half a second of a server's startup and 30 MB; scipy takes 15 MB. Call this function only in processes
    that need neither, and before pyarrow creates an array. Returns False if either is already loaded.
    """
    if any(name in sys.modules for name in _HEAVY):
        return False
    if not any(isinstance(finder, _LeftOut) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LeftOut())
    return True


def permit_pandas_and_scipy() -> None:
    """Undo ``leave_out_pandas_and_scipy``. Finders that libraries have installed in the meantime remain."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _LeftOut)]


class _Awaited(MetaPathFinder):
    """Finder that makes pyarrow notice pandas when a program imports it."""

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
    """Loader that calls pandas' own loader, and then makes pyarrow look for pandas again."""

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

        # Access pandas through pyarrow. Once this succeeds, pyarrow no longer assumes that pandas is missing.
        _ = lib._pandas_api.pd  # noqa: SLF001 - pyarrow has no other word for it


def defer_pandas() -> bool:
    """Prevent pyarrow from importing pandas until the program imports it or requests a data frame.

    pyarrow imports pandas when it first creates or reads an array, to check if the data comes from pandas. Data cannot
    come from pandas before the program has imported pandas, so until then the import is useless. Without it, trainers
    start half a second faster. Returns False if pandas is already loaded.
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
    """Ask Linux not to preempt a running thread when another thread of this process wakes up (``SCHED_BATCH``).

    Without this policy, an arriving message would interrupt a thread that is processing another message, whose data is
    in the cache. With 64 MB, a step takes 5% less time. Threads that are started later inherit this policy. A thread
    that wakes up waits for at most one time slice of a few milliseconds. If other processes keep all processors busy, a
    step takes 5% longer.

    Returns:
        False if this is not Linux, the system does not permit it, or the process has been given another policy.
    """
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):
        return False
    return True


def set_grpc_experiments() -> bool:
    """Put gRPC's experiments into the environment. Return False if gRPC was already loaded without them."""
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
