"""Planted bugs are edits of the current source."""

from __future__ import annotations

import pytest

from flightedl.domain.queue.bisection import after_failure
from flightedl.domain.queue.values import BatchRange
from tests.simulation.bugs import BUGS, CORE_BUGS
from tests.support.planting import StalePatchError, answers, bug, edited_source, planted, swaps

#: Maximum number of bugs written by hand; all others change one expression, return value or statement.
BY_HAND = 40


@pytest.mark.parametrize("name", BUGS)
def test_every_bug_changes_present_code(name):
    with planted([BUGS[name]]):
        pass


def test_few_bugs_are_written_by_hand():
    assert sum(any(edit.is_by_hand for edit in each.edits) for each in CORE_BUGS.values()) <= BY_HAND


def test_the_product_is_restored_afterwards():
    piece = BatchRange(0, 0, 0, 4, 4, failures=3)
    before = after_failure(piece, None, 3, 1)
    with planted([CORE_BUGS["the middle batch is dropped"]]):
        assert after_failure(piece, None, 3, 1) != before
    assert after_failure(piece, None, 3, 1) == before


@pytest.mark.parametrize("place", ["domain.queue.bisection:gone", "domain.queue.tasks:TaskQueue.gone"])
def test_a_missing_function_is_reported(place):
    with pytest.raises(StalePatchError, match="no function"), planted([bug("", answers(place))]):
        pass


@pytest.mark.parametrize("place", ["kernels.rules:sgd", "kernels.blocks:accumulate", "kernels.row_index:find"])
def test_a_compiled_function_is_refused(place):
    with pytest.raises(StalePatchError, match="is compiled"), planted([bug("", answers(place))]):
        pass


@pytest.mark.parametrize(("before", "times"), [("x == 4", 0), ("x", 3)])
def test_a_line_that_does_not_occur_exactly_once_is_reported(before, times):
    edit = swaps("domain.queue.bisection:after_failure", before, "y")
    with pytest.raises(StalePatchError, match=f"has {times} times"):
        edited_source("def f(x: int) -> int:\n    return x + x\n", edit)


@pytest.mark.parametrize("doc", ["", '    """Add."""\n'])
def test_statements_are_inserted_before_the_first_one(doc):
    source = f"def f(x: int) -> int:\n{doc}    return x\n"
    assert edited_source(source, answers("m:f", "0")) == f"def f(x: int) -> int:\n{doc}    return 0\n    return x\n"
