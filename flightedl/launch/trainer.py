"""Entry point of a trainer process, which runs the user's script or module as ``__main__``.

The launcher starts it as ``python -m flightedl.launch.trainer SCRIPT_OR_MODULE [ARGUMENT ...]``; users can do the same.

* After a crash, the traceback is printed from the user's first frame, and the process exits with the error's code: 1 in
  general, 2 if the script must be changed, 3 if the job cannot continue, 75 if a new trainer should take over.
* SIGTERM, or a notice that the machine is about to end, raises SystemExit in the main thread, so that ``with`` and
  ``finally`` blocks run, and a trainer that is stopped returns its work.
* The process ends when the script has ended (``process.ending``).
"""

from __future__ import annotations

import faulthandler
import importlib.util
import io
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from flightedl.adapters.notices import watched
from flightedl.config import CommonSettings, settings
from flightedl.errors import EXIT_USAGE, FlightedlError, InternalError, UsageError, exit_code_of
from flightedl.launch.policy import EXIT_TERMINATED
from flightedl.process.ending import code_of, end_process

_EXIT_INTERRUPTED = 128 + signal.SIGINT
_OUTER_FILES = {__file__, runpy.__file__, "<frozen runpy>"}
#: Stack frames in these directories do not help users to find mistakes in their own calls.
_LIBRARY = Path(__file__).resolve().parent.parent
_STANDARD_LIBRARY = Path(os.__file__).resolve().parent


def is_script(target: str) -> bool:
    """True if the target is a file and not a module."""
    return target.endswith(".py") or "/" in target or Path(target).is_file()


def check_target(target: str) -> None:
    """Check that the target exists, without importing the user's modules.

    Raises:
        UsageError: there is no such file or module.
    """
    if is_script(target):
        if not Path(target).is_file():
            raise UsageError(
                f"no such file: {target}; give the path of a Python script, or the dotted name of a module"
            )
        return
    if not all(part.isidentifier() for part in target.split(".")):
        raise UsageError(f"{target!r} is neither a file nor the dotted name of a module")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if importlib.util.find_spec(target.partition(".")[0]) is None:
        raise UsageError(f"no such file or module: {target}; is it installed, or in the current directory?")


def run(target: str, arguments: Sequence[str]) -> None:
    """Run the script or module with ``sys.argv`` set for it. Its exceptions are propagated."""
    check_target(target)
    if is_script(target):
        sys.argv = [target, *arguments]
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")
    else:
        sys.argv = [target, *arguments]
        if not _is_module(target):
            raise UsageError(f"no module named {target}: is it installed, or in the current directory?")
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def _is_module(target: str) -> bool:
    try:
        return importlib.util.find_spec(target) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{target}.".startswith(f"{error.name}."):
            return False
        raise


def main() -> int:
    """Run the target on the command line, and return the exit code."""
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python -m flightedl.launch.trainer SCRIPT_OR_MODULE [ARGUMENT ...]\n")
        return EXIT_USAGE
    faulthandler.enable()
    _flush_complete_lines()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with watched(settings(CommonSettings), lambda text: sys.stderr.write(f"flightedl trainer: {text}\n")):
            run(sys.argv[1], sys.argv[2:])
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except FlightedlError as error:
        _print_from_user_frame(error)
        return exit_code_of(error)
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever the script raised is shown
        _print_from_user_frame(error)
        return 1
    except SystemExit as error:
        code = code_of(error)
        if code:
            sys.last_value = error
        return code
    return 0


def _flush_complete_lines() -> None:
    """Flush the script's output only at line ends: the launcher shows whole lines, and each flush is a system call."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(EXIT_TERMINATED)


def _print_from_user_frame(error: BaseException) -> None:
    """Print the traceback, from the user's first frame; for a FlightedlError, its message and the user's line."""
    # Set by Python itself in other programs, so that sessions still open at exit see that the script has failed.
    sys.last_value = error
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OUTER_FILES:
        trace = trace.tb_next
    if isinstance(error, FlightedlError) and not isinstance(error, InternalError):
        of_user = [frame for frame in traceback.extract_tb(trace) if not _is_of_library(frame.filename)]
        where = f"{of_user[-1].filename}, line {of_user[-1].lineno}: " if of_user else ""
        sys.stderr.write(f"{where}{type(error).__name__}: {error}\n")
    else:
        traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()


def _is_of_library(filename: str) -> bool:
    path = Path(filename).resolve()
    if _STANDARD_LIBRARY in path.parents and not {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return _LIBRARY in path.parents and _LIBRARY / "examples" not in path.parents


if __name__ == "__main__":
    end_process(main())
