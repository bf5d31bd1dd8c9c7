"""Bugs planted in the product's code, to prove that the simulation finds them. The product does not refer to them.

A bug is a mistake in one place or in a few related places, written as the code before and after the change:

* ``answers``: a function always returns the same value;
* ``drops``: a statement is left out;
* ``swaps``: an expression is replaced with another one, as ``tests/mutation`` does with guards;
* ``rewrites``: statements are replaced with others, which were written by hand for this bug.

The function's current source is edited and compiled, and the function uses the new code for one run. If the code to be
replaced is missing or not unique, ``StalePatchError`` is raised, and the bug must be adapted.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from types import CodeType, FunctionType, ModuleType
from typing import Any

#: Modules of kernels whose functions are not compiled. numba compiles those of all others, although they look like
#: any other function.
_NOT_COMPILED = ("ahead", "compiled", "compiled_rows", "half_precision")


class StalePatchError(Exception):
    """The code that a planted bug replaces is missing or not unique."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a function."""

    #: Module below ``flightedl``, and qualified name of the function: "domain.queue.tasks:TaskQueue.finish".
    place: str
    #: Code that occurs once in the function. If it is empty, ``after`` is inserted before the first statement.
    before: str
    after: str
    is_by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug: its description and its edits."""

    what: str
    edits: tuple[Edit, ...]


def bug(what: str, *edits: Edit) -> Planted:
    """Return a bug with a description and edits."""
    return Planted(what, edits)


def answers(place: str, value: str = "None") -> Edit:
    """Make a function always return the same value."""
    return Edit(place, "", f"return {value}")


def drops(place: str, statement: str) -> Edit:
    """Leave a statement out."""
    return Edit(place, statement, "pass")


def swaps(place: str, before: str, after: str) -> Edit:
    """Replace an expression."""
    return Edit(place, before, after)


def rewrites(place: str, before: str, after: str) -> Edit:
    """Replace ``before`` with other statements, or insert them before the first statement if it is empty."""
    return Edit(place, before, textwrap.dedent(after).strip(), is_by_hand=True)


@contextmanager
def planted(bugs: Collection[Planted]) -> Iterator[None]:
    """Plant these bugs while the context lasts."""
    edits = [edit for each in bugs for edit in each.edits]
    with ExitStack() as stack:
        for place in dict.fromkeys(edit.place for edit in edits):
            function = _function(place)
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = _edited(tuple(edit for edit in edits if edit.place == place))
        yield


def _module(place: str) -> tuple[ModuleType, str]:
    name, _, qualified = place.partition(":")
    return importlib.import_module(name if name.startswith("tests.") else f"flightedl.{name}"), qualified


def _function(place: str) -> FunctionType:
    """Return the undecorated function."""
    module, qualified = _module(place)
    *owners, name = qualified.split(".")
    found: Any = module
    for owner in owners:
        found = getattr(found, owner)
    found = inspect.getattr_static(found, name, None)
    package, _, kernels = module.__name__.rpartition(".")
    if hasattr(found, "py_func") or (package == "flightedl.kernels" and kernels not in _NOT_COMPILED):
        raise StalePatchError(f"{place} is compiled, so a change of its Python code would do nothing")
    found = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", None) or found)
    if not isinstance(found, FunctionType):
        raise StalePatchError(f"there is no function {place}")
    return found


@cache
def _edited(edits: tuple[Edit, ...]) -> CodeType:
    """Return the function's code after these edits, one after the other."""
    module, qualified = _module(edits[0].place)
    lines, first = inspect.getsourcelines(_function(edits[0].place))
    source = reduce(edited_source, edits, "".join(lines))
    whole = inspect.getsource(module).splitlines(keepends=True)
    whole[first - 1 : first - 1 + len(lines)] = [source]
    return next(
        code
        for code in _codes(compile("".join(whole), str(module.__file__), "exec", dont_inherit=True))
        if code.co_qualname == qualified
    )


def edited_source(source: str, edit: Edit) -> str:
    """Return a function's source after the edit.

    Raises:
        StalePatchError: The code to replace is missing or not unique.
    """
    if not edit.before:
        function = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(function, ast.FunctionDef)
        at = function.body[ast.get_docstring(function) is not None] if len(function.body) > 1 else function.body[0]
        lines = source.splitlines(keepends=True)
        indent = lines[at.lineno - 1][: -len(lines[at.lineno - 1].lstrip())]
        lines.insert(at.lineno - 1, textwrap.indent(edit.after, indent) + "\n")
        return "".join(lines)
    if source.count(edit.before) != 1:
        raise StalePatchError(f"{edit.place} has {source.count(edit.before)} times: {edit.before}")
    at_line = source[: source.index(edit.before)].rpartition("\n")[2]
    indent = at_line[: len(at_line) - len(at_line.lstrip())]
    return source.replace(edit.before, edit.after.replace("\n", f"\n{indent}"))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
