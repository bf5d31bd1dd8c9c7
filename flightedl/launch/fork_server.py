"""The process from which a job's processes are forked, so that their common modules are imported only once.

Without it, a small job on two cores would start five processes that each spend a second on imports, and each
replacement would take another second. ``forking`` starts this process, and requests one process after another from it.

Forking is safe here because only modules are imported and machine code is loaded: gRPC, Flight and etcd's client have
no objects and no threads yet. The process imports modules in the order in which processes will be requested, and checks
for requests between modules, so the master and trainers already work while the pservers' compiler is being loaded. On
two or more cores, the launcher starts a second such process for the pservers, which loads the compiler concurrently.

A child is forked twice, and its parent exits immediately, so the kernel assigns it to the launcher, which has made
itself the *subreaper* of its descendants. From then on the child is an ordinary child of the launcher: the launcher
waits for it, and it dies with the launcher. The launcher is a subreaper only while it waits for an answer, because the
user's program may have descendants that expect another parent.

A child leads its own session and process group. It has the environment and working directory that the request states,
its output goes to the pipe sent with the request, and ``ps`` shows its own command line.

This process ends when the launcher ends, which closes the launcher's end of the socket.

Not guaranteed: that libraries see the child's environment. A library that reads variables while it loads sees this
process's, so the launcher starts it with those for the allocator, gRPC, and the number of BLAS threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flightedl.config import replace_environment
from flightedl.process.tuning import defer_pandas, leave_out_pandas_and_scipy

#: Last argument of this process. It reserves room for a child's command line.
PADDING = "-" * 512
#: Size of a number in a request and in its answer.
NUMBER_BYTES = 8
#: Kind of process -> modules it imports in addition to its main module.
_IMPORTS = {
    "master": (
        "pyarrow.flight",
        "fsspec.implementations.local",
        "flightedl.adapters.etcd",
        "flightedl.coordination.process",
        "flightedl.coordination.checkpoint_places",
        "flightedl.master.main",
    ),
    "trainer": ("flightedl.client.session", "flightedl.formats.reader", "pyarrow.compute"),
    "pserver": ("numba", "flightedl.kernels.compiled", "flightedl.pserver.main"),
}
_PR_SET_PDEATHSIG = 1
#: Seconds between checks of a child's parent.
_LOOK_S = 0.0005


class Request(NamedTuple):
    """A process requested by the launcher."""

    #: A key of ``_IMPORTS``, or a module's dotted name to import first. Other kinds import nothing first.
    kind: str
    #: The module to run as ``__main__``, and its arguments.
    module: str
    arguments: list[str]
    environment: dict[str, str]
    #: Working directory; empty means the fork server's.
    directory: str
    #: Pid of its parent.
    launcher: int


def main() -> None:
    """Serve requests until there are no more. In a child, run the requested module."""
    serve(socket.socket(fileno=0), sys.argv[1:-1])


def serve(connection: socket.socket, kinds: Sequence[str]) -> None:
    """Import the modules of these kinds, then serve requests. In a child, return when its module has ended."""
    gc.disable()
    for kind in kinds:
        _get_ready(kind, connection)
    while (received := _received(connection)) is not None:
        request, file = received
        _get_ready(request.kind, None)
        if (pid := _forked()) == 0:
            connection.close()
            _belong_to(request.launcher)
            _become(request, file)
            # The module runs again as ``__main__``, even if another module has imported it.
            sys.modules.pop(request.module, None)
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)
            return
        os.close(file)
        connection.sendall(pid.to_bytes(NUMBER_BYTES, "little"))


def _received(connection: socket.socket) -> tuple[Request, int] | None:
    head, files, _, _ = socket.recv_fds(connection, NUMBER_BYTES, 1)
    if len(head) < NUMBER_BYTES:
        return None
    left = int.from_bytes(head, "little")
    parts = []
    while left and (part := connection.recv(left)):
        parts.append(part)
        left -= len(part)
    return None if left else (Request(*json.loads(b"".join(parts))), files[0])


def _get_ready(kind: str, connection: socket.socket | None) -> None:
    """Import the modules of a kind, and load a pserver's kernels. Stop early if a request arrives."""
    with _without_pandas_and_scipy():
        for name in _IMPORTS.get(kind, (kind,) if "." in kind else ()):
            if connection is not None and select.select([connection], [], [], 0)[0]:
                return
            importlib.import_module(name)
        if kind == "pserver":
            from flightedl.kernels.compiled import block_kernels

            # Loading the first kernel takes 40 ms, each further kernel 2 ms.
            block_kernels("float32")
    # These objects are permanent: garbage collection would only write to pages that are shared with children.
    gc.freeze()


@contextlib.contextmanager
def _without_pandas_and_scipy() -> Iterator[None]:
    """Keep the modules that are imported here from loading pandas and scipy. A trainer may still import them."""
    before = list(sys.meta_path)
    leave_out_pandas_and_scipy()
    try:
        yield
    finally:
        sys.meta_path[:] = before


def _forked() -> int:
    """Return the pid of a child whose parent is the launcher, or 0 in that child."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.close(writing)
            # If requested earlier, the parent-death signal would arrive when the intermediate process ends.
            while os.getppid() == between:
                select.select([], [], [], _LOOK_S)
            return 0
        os.write(writing, child.to_bytes(NUMBER_BYTES, "little"))
        os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)
    with open(reading, "rb") as pipe:  # noqa: PTH123 - a descriptor, which has no path
        return int.from_bytes(pipe.read(), "little")


def _belong_to(launcher: int) -> None:
    os.setsid()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)


def _become(request: Request, output: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    replace_environment(request.environment)
    if request.directory:
        # As for a program started with ``-m``, this directory is searched first for modules.
        sys.path[0] = request.directory
        with contextlib.suppress(OSError):
            os.chdir(request.directory)
    sys.argv = [request.module, *request.arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    show(sys.orig_argv)
    if request.kind == "trainer":
        defer_pandas()
    if (random := sys.modules.get("numpy.random")) is not None:
        # Otherwise all children would draw the same random numbers.
        random.seed()
    gc.enable()


def show(command: Sequence[str]) -> None:
    """Write a command line over that of this process, where ``ps`` reads it."""
    text = "\0".join(command).encode()
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - before anything is imported for it
            fields = file.read().rpartition(b")")[2].split()
        # arg_start and arg_end, fields 48 and 49 of proc(5). The first element of this list is field 3.
        start, end = int(fields[45]), int(fields[46])
        if start and end - start > len(PADDING):
            ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
