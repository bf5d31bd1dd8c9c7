"""The process from which a job's processes are forked, so that they import their common modules only once.

Without the fork server, a small job on two cores would start five processes that each import for a second, and every
replacement would take another second. ``forking`` starts this process and requests others from it.

Forking is safe here because this process only imports modules and loads machine code: gRPC, Flight and etcd's client
have not created any objects or threads yet. It imports modules in the order in which processes will be requested, and
checks for requests between two imports. So the master and the trainers already work while the pservers' compiler is
being loaded. On two or more cores, a second fork server loads the compiler for the pservers concurrently.

A child is forked twice, and its parent exits immediately. The kernel then assigns the child to the launcher, which has
made itself the *subreaper* of its descendants. From then on it is an ordinary child of the launcher: the launcher waits
for it, and it dies with the launcher. The launcher is a subreaper only while it waits for an answer, because the user's
program may have descendants that rely on having another parent.

A child leads its own session and process group. It has the environment and the working directory in the request, writes
its output to the pipe that came with the request, and appears in ``ps`` with its own command line.

The fork server ends when the launcher ends, because the launcher's end of the socket is then closed.

Limitation: a library that reads environment variables while it loads sees the fork server's variables, not the child's.
So the launcher starts the fork server with the variables for the allocator, gRPC and BLAS threads.
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
from flightedl.process.tuning import defer_pandas, leave_out_pandas_and_scipy, permit_pandas_and_scipy

#: Last argument of this process. It reserves memory for the command line of a child.
PADDING = "-" * 512
#: Size in bytes of a number in requests and answers.
NUMBER_BYTES = 8
#: Kind of process -> the modules that it imports besides its main module.
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
#: Seconds between two checks of a child's parent.
_LOOK_S = 0.0005


class Request(NamedTuple):
    """A process that the launcher requests."""

    #: A key of ``_IMPORTS``, or the dotted name of a module to import first. Other values import nothing first.
    kind: str
    #: The module to run as ``__main__``, and its arguments.
    module: str
    arguments: list[str]
    environment: dict[str, str]
    #: Working directory; empty for the fork server's directory.
    directory: str
    #: Pid of its parent.
    launcher: int


def main() -> None:
    """Serve requests until the launcher closes the socket. In a child, run the requested module."""
    serve(socket.socket(fileno=0), sys.argv[1:-1])


def serve(connection: socket.socket, kinds: Sequence[str]) -> None:
    """Import the modules of these kinds of processes, then serve requests. In a child, return when its module ends."""
    gc.disable()
    for kind in kinds:
        _get_ready(kind, connection)
    # A "+" marks other modules. The client waits for the byte that says that they are imported.
    if modules := [kind[1:] for kind in kinds if kind.startswith("+")]:
        before = len([*os.scandir("/proc/self/task")])
        for module in modules:
            importlib.import_module(module)
        # Children would lack other threads than those of OpenBLAS and Arrow's allocator, which restart after a fork.
        if len([*os.scandir("/proc/self/task")]) > before:
            return
        gc.freeze()
        connection.sendall(b"+")
    while (received := _received(connection)) is not None:
        request, file = received
        _get_ready(request.kind, None)
        if (pid := _forked()) == 0:
            connection.close()
            _belong_to(request.launcher)
            _become(request, file)
            # Run the module as ``__main__``, even if another module has already imported it.
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
    """Import the modules for a kind of process and, for pservers, load the kernels. Stop early if a request arrives."""
    with _without_pandas_and_scipy():
        for name in _IMPORTS.get(kind, (kind,) if "." in kind and kind[0] != "+" else ()):
            if connection is not None and select.select([connection], [], [], 0)[0]:
                return
            importlib.import_module(name)
        if kind == "pserver":
            from flightedl.kernels.compiled import block_kernels

            # Loading the first kernel takes 40 ms, and each further kernel takes 2 ms.
            block_kernels("float32")
    # Exclude these permanent objects from garbage collection, which would write to pages shared with children.
    gc.freeze()


@contextlib.contextmanager
def _without_pandas_and_scipy() -> Iterator[None]:
    """Prevent the modules imported here from loading pandas and scipy. Trainers can still import them."""
    leave_out_pandas_and_scipy()
    try:
        yield
    finally:
        permit_pandas_and_scipy()


def _forked() -> int:
    """Return the pid of a child whose parent is the launcher. In that child, return 0."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.close(writing)
            # If the signal were requested earlier, it would arrive when the intermediate process ends.
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
        # This directory comes first in the search for modules, as for a program started with ``-m``.
        sys.path[0] = request.directory
        with contextlib.suppress(OSError):
            os.chdir(request.directory)
    sys.argv = [request.module, *request.arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    show(sys.orig_argv)
    if request.kind == "trainer":
        defer_pandas()
    if (random := sys.modules.get("numpy.random")) is not None:
        # All children would otherwise draw the same random numbers.
        random.seed()
    gc.enable()


def show(command: Sequence[str]) -> None:
    """Overwrite this process's command line, which ``ps`` displays."""
    text = os.fsencode("\0".join(command))
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - before anything is imported for it
            fields = file.read().rpartition(b")")[2].split()
        # arg_start and arg_end are fields 48 and 49 in proc(5). This list begins with field 3.
        start, end = int(fields[45]), int(fields[46])
        if start and end - start > len(PADDING):
            ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
