"""The table of failures in the documentation: each row names an existing test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "deploy" / "README.md"
_LINK = re.compile(r"\[`(\w+)`\]\(([^)]+)\)")


def _rows() -> list[str]:
    section = README.read_text().partition("## What happens when X dies")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def test_the_table_has_rows() -> None:
    assert len(_rows()) > 20


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row.split("|")[1].strip())
def test_each_row_links_an_existing_test(row: str) -> None:
    _, what, happens, shown, _ = row.split("|")
    assert what.strip()
    assert happens.strip()
    links = _LINK.findall(shown)
    assert links, "no test is linked"
    for name, path in links:
        tree = ast.parse((README.parent / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
