"""Bugs planted in the product's own code, to show that a run finds them. Nothing in production knows of them.

A bug is one mistake in one place, or in the few places that it takes, written as the line before and the line after:

* ``answers``: a function answers the same whatever it is asked;
* ``drops``: a statement is left out;
* ``swaps``: an expression becomes another one, as the operators of ``tests/mutation`` change a guard;
* ``rewrites``: other statements stand there. These are written by hand, for the sake of a story.

The source of today is edited, compiled, and its code put into the function for as long as the run lasts. A bug whose
line is gone, or is there twice, raises ``StalePatchError``: whoever changes the line says what the bug is now.
The flaws of ``bugs`` are in what the simulation models itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any


class StalePatchError(Exception):
    """The line that a planted bug changes is not there, or not once."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a function."""

    #: Module below ``flightedl``, and the function's qualified name in it: "domain.queue.tasks:TaskQueue.finish".
    place: str
    #: Occurs once in the function; empty: ``after`` stands before the function's first statement.
    before: str
    after: str
    is_by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug: what goes wrong, and where."""

    what: str
    edits: tuple[Edit, ...]


def bug(what: str, *edits: Edit) -> Planted:
    """Name what goes wrong, and the edits that make it so."""
    return Planted(what, edits)


def answers(place: str, value: str = "None") -> Edit:
    """Let a function answer always the same."""
    return Edit(place, "", f"return {value}")


def drops(place: str, statement: str) -> Edit:
    """Leave a statement out."""
    return Edit(place, statement, "pass")


def swaps(place: str, before: str, after: str) -> Edit:
    """Let an expression be another one."""
    return Edit(place, before, after)


def rewrites(place: str, before: str, after: str) -> Edit:
    """Let other statements stand in place of ``before``, or before the first statement."""
    return Edit(place, before, textwrap.dedent(after).strip(), is_by_hand=True)


@contextmanager
def planted(bugs: Collection[Planted]) -> Iterator[None]:
    """Have these bugs for as long as this lasts."""
    with ExitStack() as stack:
        for edit in [edit for each in bugs for edit in each.edits]:
            function = _function(edit.place)
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = _edited(edit)
        yield


def _module(place: str) -> tuple[ModuleType, str]:
    name, _, qualified = place.partition(":")
    return importlib.import_module(f"flightedl.{name}"), qualified


def _function(place: str) -> FunctionType:
    """The function itself, however it is decorated in its class."""
    module, qualified = _module(place)
    *owners, name = qualified.split(".")
    found: Any = module
    for owner in owners:
        found = getattr(found, owner)
    found = inspect.getattr_static(found, name, None)
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    if not isinstance(found, FunctionType):
        raise StalePatchError(f"there is no function {place}")
    return found


@cache
def _edited(edit: Edit) -> CodeType:
    """The function's code with the edit."""
    module, qualified = _module(edit.place)
    lines, first = inspect.getsourcelines(_function(edit.place))
    source = edited_source("".join(lines), edit)
    whole = inspect.getsource(module).splitlines(keepends=True)
    whole[first - 1 : first - 1 + len(lines)] = [source]
    return next(
        code
        for code in _codes(compile("".join(whole), str(module.__file__), "exec", dont_inherit=True))
        if code.co_qualname == qualified
    )


def edited_source(source: str, edit: Edit) -> str:
    """The source of a function with the edit.

    Raises:
        StalePatchError: the line is not there, or not once.
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
