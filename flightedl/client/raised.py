"""Where the user's code raised, so that errors at different batches can be told to be the same one.

A place names the error's class and the lines that led to it, innermost last, by files' names without their directories.
What the error says is left out: it may name the record.
"""

from __future__ import annotations

import traceback
from pathlib import Path

_LIBRARY = Path(__file__).resolve().parent.parent
_LINES_LIMIT = 8


def place_of(error: BaseException) -> str:
    """The place of an error that was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not _is_ours(frame.filename)] or list(frames)
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in of_user[-_LINES_LIMIT:]]
    return f"{type(error).__name__} at {' > '.join(lines)}"[:500]


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return _LIBRARY in path.parents and _LIBRARY / "examples" not in path.parents
