"""Atomic result files: they are written under a temporary name, flushed, and then renamed.

If two processes write the same file, one of the two versions remains, and it is complete.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


def save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
    """Write an ``.npz`` file, which ``numpy.load`` can read without pickle. Return ``path``."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **dict(arrays))
    return _replace(path, buffer.getvalue())


def save_json(path: Path, values: Mapping[str, object]) -> Path:
    """Write an indented JSON file. Return ``path``."""
    return _replace(path, msgspec.json.format(msgspec.json.encode(dict(values)), indent=2) + b"\n")


def _replace(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    return path
