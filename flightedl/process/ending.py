"""End a process without the interpreter's final steps.

The interpreter would stop gRPC's threads, and threads that compile or load, at arbitrary points. A stopped thread that
holds a lock may block the process forever. Other stopped threads may crash the process, and the crash would be reported
although nothing was lost.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from typing import NoReturn


def code_of(ended: SystemExit) -> int:
    """Return the exit code of a ``sys.exit``, as the interpreter does. Print its argument if it is not a number."""
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code & 0xFF
    sys.stderr.write(f"{ended.code}\n")
    return 1


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
