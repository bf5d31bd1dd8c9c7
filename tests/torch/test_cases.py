"""The table of cases names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_NAMED = re.compile(r"`([\w./]+\.py)(?:::(\w+))?`")
NAMED = sorted(set(_NAMED.findall((_HERE / "README.md").read_text())))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[f"{file}::{test}" for file, test in NAMED])
def test_every_case_has_an_existing_test(file: str, test: str) -> None:
    tree = ast.parse((_HERE / file).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not test or test in functions
