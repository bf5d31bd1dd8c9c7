"""All marks in the product's code, and the marks that processes of a test have recorded in a directory."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import flightedl


def all_marks() -> set[str]:
    """Return the marks in the product's source."""
    found: set[str] = set()
    for file in Path(flightedl.__file__).parent.rglob("*.py"):
        text = file.read_text("utf-8")
        if "sometimes(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(func=ast.Name(id="sometimes"), args=[ast.Constant(value=str(mark))]):
                    found.add(mark)
                case _:
                    pass
    return found


def left_in(directory: Path) -> Counter[str]:
    """Return the number of processes that reached each mark, read from the directory ``FLIGHTEDL_MARKS``."""
    return Counter(line for file in directory.glob("*.marks") for line in file.read_text("utf-8").splitlines())


def report(counts: Mapping[str, int]) -> str:
    """Return a line for each mark, rarest first, followed by the marks that were never reached."""
    marks = sorted(all_marks(), key=lambda mark: (counts.get(mark, 0), mark))
    return "\n".join(f"{counts.get(mark, 0) or 'never':>8}  {mark}" for mark in marks)
