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
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from flightedl.adapters.notices import watched
from flightedl.config import CommonSettings, settings
from flightedl.errors import EXIT_USAGE, UsageError, exit_code_of
from flightedl.launch.policy import EXIT_TERMINATED
from flightedl.process.ending import code_of, end_process, print_error

_OUTER_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


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
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever the script raised is shown
        print_error(error, _OUTER_FILES)
        return _ended(error)
    except KeyboardInterrupt as error:
        return _ended(error)
    except SystemExit as error:
        code_of(error)
        return _ended(error)
    return 0


def _ended(error: BaseException) -> int:
    # Set by Python itself in other programs, so that sessions still open at exit see how the script has ended.
    sys.last_value = error
    return exit_code_of(error)


def _flush_complete_lines() -> None:
    """Flush the script's output only at line ends: the launcher shows whole lines, and each flush is a system call."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(EXIT_TERMINATED)


if __name__ == "__main__":
    end_process(main())
