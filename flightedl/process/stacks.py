"""Stack traces of all threads of this process, as a debugger shows them, reported by the process itself.

No permission to inspect another process is required. The report contains only names of functions and the last two
components of file names: no source lines, no values, and no directories.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

_DEPTH_LIMIT = 40
_THREADS_LIMIT = 60


def stacks() -> str:
    """Return each thread with its calls, innermost call last. The calling thread comes last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    found = sys._current_frames()  # noqa: SLF001 - documented, for exactly this
    frames = sorted(found.items(), key=lambda each: (each[0] == own, names.get(each[0], "")))
    described = [_described(names.get(ident, "without a name"), frame) for ident, frame in frames[:_THREADS_LIMIT]]
    return "\n\n".join(described)


def _described(name: str, frame: FrameType | None) -> str:
    calls: list[str] = []
    while frame is not None and len(calls) < _DEPTH_LIMIT:
        code = frame.f_code
        calls.append(f"  {_short(code.co_filename)}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return "\n".join([f"thread {name}", *reversed(calls)])


def _short(path: str) -> str:
    folder, name = os.path.split(path)
    return f"{os.path.basename(folder)}/{name}" if folder else name  # noqa: PTH119 - of a text, not of a file
