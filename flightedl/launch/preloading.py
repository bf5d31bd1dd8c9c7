"""Modules to import before trainers are forked, because their script imports them anyway.

Only the first statements count, up to one that may touch the environment: not the import of a harmless module.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

#: Imported module -> modules to import in advance, also for an optimizer. All trainers have NumPy and Arrow anyway.
_PRELOADED = {"torch": ("torch", "torch._dynamo"), "pandas": ("pandas",)}
_HARMLESS = {*sys.stdlib_module_names, *_PRELOADED, "click", "flightedl", "numpy", "pyarrow"}


def modules_of(target: str) -> list[str]:
    """Return the modules to import in advance for a script or module. Nothing is imported for packages of users."""
    found: list[str] = []
    try:
        spec = importlib.util.find_spec(target) if target.startswith("flightedl.") else None
        file = Path(target if spec is None else spec.origin or "")
        statements = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    for statement in statements:
        match statement:
            case ast.Import(names):
                imported = {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                imported = {module.partition(".")[0]}
            case ast.Expr(ast.Constant()):
                continue
            case _:
                break
        beside = (file.with_name(name + end) for name in imported for end in ("", ".py"))
        if not imported <= _HARMLESS or any(each.exists() for each in beside):
            break
        found += [name for each in sorted(imported) for name in _PRELOADED.get(each, ()) if name not in found]
    return found
