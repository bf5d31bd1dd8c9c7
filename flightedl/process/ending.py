"""How a script has ended, what is printed about it, and the end of its process without the interpreter's final steps.

The interpreter would stop gRPC's threads, and threads that compile or load, at arbitrary points. A stopped thread that
holds a lock may block the process forever. Other stopped threads may crash the process, and the crash would be reported
although nothing was lost.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from flightedl.errors import FlightedlError, InternalError, exit_code_of

_LIBRARY = Path(__file__).resolve().parent.parent
_STANDARD_LIBRARY = Path(os.__file__).resolve().parent
_PACKAGES = {"site-packages", "dist-packages"}


def code_of(ended: SystemExit) -> int:
    """Return the exit code of a ``sys.exit``, as the interpreter does. Print its argument if it is not a number."""
    if ended.code is not None and not isinstance(ended.code, int):
        sys.stderr.write(f"{ended.code}\n")
    return exit_code_of(ended)


#: The most recent call of ``sys.exit`` on the main thread, at most one.
_exits: list[SystemExit] = []


@functools.cache
def watch_exits() -> None:
    """Note every call of ``sys.exit`` from now on, because the interpreter does not keep its exception."""
    original = sys.exit

    @functools.wraps(original)
    def watched(*status: Any) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            _exits[:] = [SystemExit(*status)]
        original(*status)

    sys.exit = watched


@functools.cache
def report_errors() -> None:
    """If a FlightedlError ends the script, print it as ``print_error`` does, and end the process with its exit code.

    A hook that somebody else has set, such as IPython, stays.
    """

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, FlightedlError) or sys.flags.interactive or hasattr(sys, "ps1"):
            sys.__excepthook__(kind, error, trace)
            return
        print_error(error)
        # The interpreter would choose 1, whatever a hook does.
        end_process(exit_code_of(error))

    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = report


def print_error(error: BaseException, outer: Collection[str] = ()) -> None:
    """Print the error that has ended the script: its traceback or, for a FlightedlError, its message and the line.

    In a group, only rank 0 prints the whole message, because the ranks usually fail alike. With ``FLIGHTEDL_DEBUG=1``,
    all tracebacks are printed.

    Args:
        error: The error.
        outer: Files whose frames precede those of the script.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in outer:
        trace = trace.tb_next
    rank = os.environ.get("RANK", "0")
    if not isinstance(error, FlightedlError) or isinstance(error, InternalError) or os.environ.get("FLIGHTEDL_DEBUG"):
        traceback.print_exception(type(error), error, trace)
    elif rank != "0":
        sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error!s:.100}\n")
    else:
        others = [frame for frame in traceback.extract_tb(trace) if not is_of_library(frame.filename)]
        # Installed packages may call flightedl for the user. If there are only such frames, the script is installed.
        of_user = [frame for frame in others if not _PACKAGES & set(Path(frame.filename).parts)] or others
        where = f"{of_user[-1].filename}, line {of_user[-1].lineno}: " if of_user else ""
        sys.stderr.write(f"{where}{type(error).__name__}: {error}\n")
    sys.stderr.flush()


def is_of_library(filename: str) -> bool:
    """True if a file belongs to Python or to this package, so that its lines do not help users to find a mistake."""
    if filename.startswith("<"):
        # Generated code, such as the constructors of dataclasses.
        return True
    path = Path(filename).resolve()
    if _STANDARD_LIBRARY in path.parents and not _PACKAGES & set(path.parts):
        return True
    return _LIBRARY in path.parents and _LIBRARY / "examples" not in path.parents


def script_error(*, is_over: bool = False) -> BaseException | None:
    """Return the exception that is being handled or, if the script is over, that has ended it; None if there is none.

    A ``raise SystemExit`` without ``sys.exit`` leaves no trace. Exit functions run after the main thread has ended.
    """
    if (handled := sys.exc_info()[1]) is not None:
        return handled
    is_over = is_over or not threading.main_thread().is_alive()
    return (getattr(sys, "last_value", None) or next(iter(_exits), None)) if is_over else None


def end_process(code: int) -> NoReturn:
    """End the process after its threads have ended and its exit functions have run."""
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - waits for threads that are not daemons
    atexit._run_exitfuncs()  # noqa: SLF001 - as ``os._exit`` leaves them out
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End the process without waiting for its threads. Only its output is flushed."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
