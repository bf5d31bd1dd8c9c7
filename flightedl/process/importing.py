"""Import without garbage collection, and report missing optional packages.

During imports, the garbage collector inspects more and more objects, but finds none to free, because modules live as
long as the process. This work would take a sixth of the startup time.
"""

from __future__ import annotations

import gc
import importlib.util
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from flightedl.errors import UsageError


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable automatic garbage collection inside the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def of_a_server() -> Iterator[None]:
    """Disable collection, and exempt loaded objects permanently. For processes that load everything at startup.

    Do not call this in a trainer: objects that the user's program created earlier may become garbage later.
    """
    with without_collection():
        yield
        gc.freeze()


def require(module: str, purpose: str, extra: str) -> None:
    """Raise UsageError, with the command that installs it, if a module of an optional package is missing."""
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{purpose} needs {module}, which is not installed: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra's packages by their own names.

    The command also works for a clone of the repository, for which pip does not know flightedl's extras.
    """
    return f"pip install {shlex.join(_packages(extra))}"


def _packages(extra: str) -> list[str]:
    from importlib import metadata  # Imported lazily, because it takes 20 ms.

    found: list[str] = []
    for line in metadata.requires("flightedl") or []:
        package, _, marker = line.partition(";")
        if f'extra == "{extra}"' not in marker:
            continue
        own, _, others = package.strip().partition("[")
        found += [package.strip()] if own != "flightedl" else _packages(others.rstrip("]"))
    return found
