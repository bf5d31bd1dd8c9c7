"""Division of a parameter's rows among pservers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.row_ranges import MAX_WIDTH, is_matrix, parts_of, require_range, row_ranges, width_of
from flightedl.domain.model.sharding import plan_shards
from flightedl.errors import MessageError


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 5), st.data())
def test_ranges_are_all_rows_in_order_and_on_their_owners(
    rows: int, width: int, pservers: int, data: st.DataObject
) -> None:
    spec = ParameterSpec("w", (rows, width))
    plan = plan_shards(
        [ParameterSpec("before", (5,)), spec, ParameterSpec("after", (7, 3))], pservers, block_bytes=1024
    )
    start = data.draw(st.integers(0, rows))
    wanted = range(start, data.draw(st.integers(start, rows)))
    owners = np.empty(spec.size, np.int64)
    for number in plan.block_range("w"):
        block = plan.block(number)
        owners[block.start : block.stop] = block.pserver
    at = wanted.start
    for first, stop, parts in row_ranges(plan, spec, wanted):
        assert (first, len(parts) == 1 or stop - first == 1) == (at, True)
        assert [parts[0].start, parts[-1].stop] == [first * width, stop * width]
        assert all(one.stop == other.start for one, other in pairwise(parts))
        for part in parts:
            assert part.start < part.stop
            assert (owners[part.start : part.stop] == part.pserver).all()
        at = stop
    assert at == wanted.stop


def test_a_row_may_be_on_several_pservers() -> None:
    spec = ParameterSpec("w", (2, 40_000))
    plan = plan_shards([spec], 4)
    assert len(parts_of(plan, "w", 0, spec.size)) == 4
    assert [len(parts) for _, _, parts in row_ranges(plan, spec, range(2))] == [2, 2]


def test_only_short_slices_are_rows() -> None:
    assert width_of(ParameterSpec("w", ())) == width_of(ParameterSpec("w", (9,))) == 1
    assert width_of(ParameterSpec("w", (3, 4, 5))) == 20
    assert is_matrix(ParameterSpec("w", (3, 1)))
    assert not is_matrix(ParameterSpec("w", (2, MAX_WIDTH + 1)))


@pytest.mark.parametrize(("start", "stop"), [(0, 11), (7, 6), (11, None)])
def test_rows_that_do_not_exist_are_rejected(start: int, stop: int | None) -> None:
    with pytest.raises(MessageError, match="it has rows 0 to 10"):
        require_range("w", start, stop, 10)
