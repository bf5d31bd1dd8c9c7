"""Ids in the forms that users have, and bags of ids."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flightedl.client.tables.bags import Bags
from flightedl.client.tables.ids import found_ids, text_ids
from flightedl.client.tables.requests import DistinctIds, Divided, places_within
from flightedl.client.tables.traffic import Lookup
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_for
from flightedl.domain.tables.placement import bucket_owners, buckets_of, id_of_text
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import UsageError
from flightedl.wire.table_rows import Kind, Section, encode_sections

TABLE = TableSpec("t", 2, SGD(lr=1.0))
TEXTS = ["a", "b", "a", "c"]
HASHED = [id_of_text(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, -1], [1, 2**64 - 1]),
        (np.array([[1, 2], [3, 4]], np.int8), [1, 2, 3, 4]),
        (np.array([2**64 - 1], np.uint64), [2**64 - 1]),
        ([], []),
        ([[], []], []),
        ([2**64 - 1, -(2**63)], [2**64 - 1, 2**63]),
        ((np.int8(-1), np.uint64(3)), [2**64 - 1, 3]),
        ([np.array([1, 2]), [3, 4]], [1, 2, 3, 4]),
        (np.array([3, 4], object), [3, 4]),
        (bytearray(b"a"), [HASHED[0]]),
        ([["a", "a\0"], [b"b", "\0"]], [id_of_text(text) for text in ("a", "a\0", "b", "\0")]),
        (pa.array(["a", "a\0"], pa.string_view()), [id_of_text("a"), id_of_text("a\0")]),
        (pa.array([b"a", b"a\0"], pa.binary_view()), [id_of_text("a"), id_of_text("a\0")]),
        (pa.array([b"a"], pa.large_binary()), HASHED[:1]),
        (pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["a", None])), HASHED[::2][:2]),
        (TEXTS, HASHED),
        (np.array(TEXTS), HASHED),
        (pa.array(TEXTS), HASHED),
        (pa.array(TEXTS).dictionary_encode(), HASHED),
        (pa.chunked_array([[1, 2], [3]]), [1, 2, 3]),
        (pa.array([7, 9, 7], pa.uint16()).slice(1), [9, 7]),
        (pa.array([b"a"]), HASHED[:1]),
        (pa.array([], pa.string()), []),
    ],
)
def test_ids_are_integers_or_strings_of_any_type(value: Any, expected: list[int]) -> None:
    found = found_ids("t", value)
    assert found.ids.tolist() == expected
    assert found.nulls is None
    assert found.ids.dtype == np.uint64


def test_lists_are_bags_and_nulls_are_marked() -> None:
    found = found_ids("t", pa.array([[1, 2], [], [3]]).slice(1))
    assert (found.ids.tolist(), found.offsets.tolist()) == ([3], [0, 0])
    found = found_ids("t", pa.array([1, None, 3]))
    assert found.nulls.tolist() == [False, True, False]
    assert found_ids("t", pa.array(["a", None])).nulls.tolist() == [False, True]
    assert found_ids("t", pa.array(["a", None]).dictionary_encode()).nulls.tolist() == [False, True]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.5], "'float' object"),
        (pa.array([1.0]), "are double"),
        (object(), "'object' object"),
        (pa.array([[1], None]), "lists that are null"),
        ([None], "'NoneType' object"),
        ([1, "a"], "must be all numbers or all texts, but some are str"),
        ([["a"], [1]], "must be all numbers or all texts"),
        (np.array([1, "a"], object), "must be all numbers or all texts"),
        ([1, True], "some are bool"),
        (np.array([True]), "are bool"),
        ([[1, 2], [3]], "'list' object"),
        ([2**64], "have 18446744073709551616, which does not fit into 64 bits"),
        ([1, -(2**63) - 1], "does not fit into 64 bits"),
        (["\ud800"], "surrogates not allowed"),
        (np.ma.array([1, 2], mask=[False, True]), "are masked"),
        ([np.ma.array([1, 2], mask=[False, True])], "are masked"),
    ],
)
def test_anything_else_is_refused(value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=f"ids of table 't'.*{text}"):
        found_ids("t", value)


def test_one_long_text_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        found_ids("t", ["x" * 100_000] + ["y"] * 1000)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_nulls_of_a_dictionary_are_nulls() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array(["a", None]))
    assert found_ids("t", column).nulls.tolist() == [False, True, True]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_each_id_is_requested_once_from_its_pserver(count: int) -> None:
    ids = np.random.default_rng(0).integers(0, 50, 200).astype(np.uint64)
    distinct = DistinctIds(ids)
    assert sorted(distinct.ids.tolist()) == sorted(set(ids.tolist()))
    assert (distinct.ids[distinct.places] == ids).all()
    gradients = np.random.default_rng(1).normal(size=(200, 2)).astype(np.float32)
    sums, bad = distinct.summed(gradients)
    assert bad == -1
    for place, one in enumerate(distinct.ids):
        assert np.allclose(sums[place], gradients[ids == one].sum(0), atol=1e-5)
    owners = np.roll(bucket_owners(count), 300)
    divided = Divided([TABLE, TABLE], [distinct.ids, distinct.ids[:3]], owners, count)
    for pserver in range(count):
        for place, mine in enumerate(divided.ids_of(pserver)):
            assert (owners[buckets_of(mine, TABLE.salt)] == pserver).all()
            assert len(mine) == divided.counts[pserver, place]
    assert divided.counts.sum(0).tolist() == [len(distinct.ids), 3]


def test_ids_of_many_tables_are_numbered_together_as_if_separately() -> None:
    chance = np.random.default_rng(0)
    many = [chance.integers(0, 20, count).astype(np.uint64) for count in (30, 0, 1, 200)]
    for one, ids in zip(DistinctIds.of_each(many), many, strict=True):
        alone = DistinctIds(ids)
        assert one.ids.tolist() == alone.ids.tolist()
        assert one.places.tolist() == alone.places.tolist()
        assert one.is_of(ids)
    assert DistinctIds.of_each([]) == []


def test_a_push_uses_the_gradients_present_at_that_time() -> None:
    gradients = np.ones((2, 3), np.float32)
    sums, _ = DistinctIds(np.arange(2, dtype=np.uint64)).summed(gradients)
    gradients[:] = 7
    assert sums.tolist() == np.ones((2, 3)).tolist()


@pytest.mark.parametrize("ids", [[3, 1, 3, 2], [3, 1, 4, 2]])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_gradient_that_is_not_finite_is_named(ids: list[int], value: float) -> None:
    distinct = DistinctIds(np.array(ids, np.uint64))
    gradients = np.zeros((4, 3), np.float32)
    gradients[[2, 3], 1] = value
    assert distinct.summed(gradients)[1] == 2


def test_ids_are_distinguished_regardless_of_their_bits() -> None:
    """Ids that are multiples of large powers of two collide in the index, and so do equal ids."""
    for ids in (np.arange(300, dtype=np.uint64) << np.uint64(55), np.full(300, 7, np.uint64), np.empty(0, np.uint64)):
        distinct = DistinctIds(ids)
        assert distinct.ids.tolist() == list(dict.fromkeys(ids.tolist()))
        assert (distinct.ids[distinct.places] == ids).all()
        rows = np.arange(2.0 * len(distinct.ids), dtype=np.float32).reshape(-1, 2)
        assert (distinct.spread(rows) == rows[distinct.places]).all()
        assert distinct.is_of(ids.copy())
        assert not distinct.is_of(ids[1:]) or not len(ids)


def reference(combiner: str, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    if not len(rows):
        return np.zeros(rows.shape[1])
    if combiner == "max":
        return rows.max(0)
    total = (rows * weights[:, None]).sum(0)
    return total / {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_bags_and_their_gradients_match_the_formula(combiner: str, is_weighted: bool) -> None:
    if combiner == "max" and is_weighted:
        with pytest.raises(UsageError, match="accepts no weights"):
            Bags("t", 1, [0], [1.0], combiner, None)
        return
    chance = np.random.default_rng(2)
    rows, weights = chance.normal(size=(9, 3)).astype(np.float32), chance.uniform(0.5, 2, 9).astype(np.float32)
    left_out = np.arange(9) == 4
    offsets = np.array([0, 0, 3, 4, 5, 9])
    bags = Bags("t", 9, offsets, weights if is_weighted else None, combiner, left_out)
    used = weights if is_weighted else np.ones(9, np.float32)
    spans = [np.arange(a, b)[~left_out[a:b]] for a, b in zip(offsets, [*offsets[1:], 9], strict=True)]
    found = bags.combined(rows[bags.kept])
    for bag, span in enumerate(spans):
        assert np.allclose(found[bag], reference(combiner, rows[span], used[span]), atol=1e-5)
    upstream = chance.normal(size=found.shape).astype(np.float32)
    gradients = np.zeros_like(rows)
    gradients[bags.kept] = bags.spread(upstream)
    for place in range(9):
        for element in range(3):
            moved = rows.astype(np.float64)
            moved[place, element] += 1e-4
            change = sum(
                (reference(combiner, moved[span], used[span]) - reference(combiner, rows[span], used[span]))
                @ upstream[bag]
                for bag, span in enumerate(spans)
            )
            assert abs(change / 1e-4 - gradients[place, element]) < 1e-2


def test_the_first_of_equal_elements_is_the_maximum() -> None:
    bags = Bags("t", 3, [0, 2], None, "max", None)
    with pytest.raises(UsageError, match="pull the bags before"):
        bags.spread(np.ones((2, 1), np.float32))
    assert bags.combined(np.array([[1.0], [1.0], [2.0]], np.float32)).tolist() == [[1.0], [2.0]]
    assert bags.spread(np.ones((2, 1), np.float32)).tolist() == [[1.0], [0.0], [1.0]]


def test_ids_of_strings_match_those_of_an_exported_table() -> None:
    texts = ["berlin", "paris", "berlin", "\u00e5", ""]
    ids = text_ids(texts)
    assert ids.dtype == np.int64
    for column in (texts, np.array(texts), pa.array(texts), pa.chunked_array([texts[:2], texts[2:]])):
        assert text_ids(column).tolist() == ids.tolist()
        assert found_ids("t", column).ids.view(np.int64).tolist() == ids.tolist()
    assert text_ids([text.encode() for text in texts]).tolist() == ids.tolist()
    assert text_ids([]).tolist() == []
    for wrong in ([1], [None], pa.array(["a", None])):
        with pytest.raises(UsageError, match="text_ids takes a list of texts"):
            text_ids(wrong)


def test_a_lookup_that_is_repeated_forgets_the_answer_before() -> None:
    """After a broken stream, rows of the first answer may be of another version than those of the second one."""
    plan = plan_for([ParameterSpec("w", (2,))], 1, 1, [TABLE])
    buckets = plan.buckets_of(0)
    halves = [range(buckets.start, buckets.start + len(buckets) // 2)]
    halves.append(range(halves[0].stop, buckets.stop))
    ids = np.arange(50, dtype=np.uint64)
    lookup = Lookup(plan, {0: DistinctIds(ids)})

    def answer(blocks: range, version: int) -> None:
        places = places_within(ids, TABLE, range(blocks.start - plan.block_count, blocks.stop - plan.block_count))
        rows = np.full((len(places), TABLE.dim), version, np.float32)
        sections = encode_sections([Section(Kind.ROWS, 0, ids[:0], rows)])
        lookup.take(0, blocks, version, memoryview(sections))

    lookup.begin(0)
    answer(halves[0], 3)
    assert (lookup.missing(), lookup.version(0)) == ([0], 3)
    lookup.begin(0)
    answer(halves[1], 5)
    assert lookup.missing() == [0], "rows of two answers are taken for one"
    answer(halves[0], 6)
    assert (lookup.missing(), lookup.version(0)) == ([], 5)
    assert set(lookup.rows(0).ravel().tolist()) == {5.0, 6.0}


def test_rows_of_a_lookup_are_copied_for_each_reader() -> None:
    plan = plan_for([ParameterSpec("w", (2,))], 1, None, [TABLE])
    lookup = Lookup(plan, {0: DistinctIds(np.array([4, 9], np.uint64))})
    lookup.rows(0)[:] = 1.0
    first, second = lookup.spread([0])[0], lookup.spread([0])[0]
    first[:] = 7.0
    assert second.tolist() == lookup.rows(0).tolist() == [[1.0, 1.0]] * 2


def test_a_lookup_that_is_repeated_elsewhere_forgets_the_first_answers() -> None:
    plan = plan_for([ParameterSpec("w", (2,))], 1, None, [TABLE])
    lookup = Lookup(plan, {0: DistinctIds(np.array([4, 9], np.uint64))})
    lookup.unknown[0] = [4]
    lookup.begin(0)
    lookup._received[0] = 3
    lookup.place(plan)
    assert not lookup.unknown
    assert lookup.missing() == [0]
