"""Docstrings begin with a verb or a noun, not with a relative clause: those that do may only become fewer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .pages import ROOT

#: How many docstrings of the product begin so now. Lower it when you have rewritten some; it never rises.
RELATIVE_CLAUSES = 0
_BEGINS_SO = re.compile(r"(What|Of|Who|Whether|Where|In which)\b")


def docstrings() -> Iterator[str]:
    for folder in ("flightedl", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield ast.get_docstring(node) or ""


def test_fewer_docstrings_begin_with_a_relative_clause() -> None:
    found = sum(_BEGINS_SO.match(text) is not None for text in docstrings())
    assert found <= RELATIVE_CLAUSES, "begin with a verb in the imperative, with what it returns, or with a noun"
    assert found == RELATIVE_CLAUSES, f"well done: RELATIVE_CLAUSES is {found} from now on"
