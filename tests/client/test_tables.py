"""Rows of tables, pulled from and pushed to real pservers in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from flightedl.client.model.job_model import JobModel
from flightedl.client.tables.table import Table, asked_of
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.initial import Uniform
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import GradientError, UsageError
from flightedl.messages.status import TableCounts
from flightedl.pserver.stores.interface import distinct

from .pserver_bench import Cluster, Trainer

USERS = TableSpec("users", 2, SGD(lr=1.0))
ITEMS = TableSpec("items", 3, SGD(lr=1.0), init=Uniform(0.5), seed=4)
BOTH = [ITEMS, USERS]


def table_of(trainer: Trainer, spec: TableSpec, tables: list[TableSpec] = BOTH) -> Table:
    number = [each.name for each in tables].index(spec.name)
    return Table(spec, lambda _: (number, trainer.parameters), lambda name: TableCounts(name=name))


def ones(count: int, dim: int = 2) -> np.ndarray:
    return np.ones((count, dim), np.float32)


IDS = np.array([5, 9, -3, 5, 2**40, 77, 12345], np.int64)


@pytest.mark.parametrize("pservers", [1, 3])
@pytest.mark.parametrize("mode", [Sync(), Async(), Bounded(staleness=2)], ids=lambda mode: type(mode).__name__)
@pytest.mark.parametrize("shapes", [{"w": (4,)}, {}], ids=["dense", "alone"])
def test_rows_are_pushed_with_the_step_and_read_with_its_update(mode: Mode, pservers: int, shapes: dict) -> None:
    with Cluster(shapes, mode, pservers=pservers, tables=BOTH) as cluster:
        one = cluster.trainer()
        users, items = table_of(one, USERS), table_of(one, ITEMS)
        one.begin(0)
        assert (users.pull(IDS) == 0).all()
        first = items.pull(IDS)
        assert len(np.unique(first)) > 10, "first values differ"
        users.push(IDS, ones(len(IDS)))
        users.push([77, 78], ones(2))
        assert (users.pull(IDS) == 0).all(), "rows are pushed with the step"
        one.step(0, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
        one.begin(1)
        found = users.pull([*IDS.tolist(), 78, 1000])
        assert found[:, 0].tolist() == [-2, -1, -1, -2, -1, -2, -1, -1, 0]
        assert (items.pull(IDS) == first).all(), "no gradient was pushed to this table"
        items.push(IDS[1:3], ones(2, 3))
        one.step(1, {})
        one.begin(2)
        assert (items.pull(IDS[1:4]) == first[1:4] - [[1], [1], [0]]).all()
        if "w" in shapes:
            assert one.parameters["w"].tolist() == [-1] * 4


def test_a_round_sums_rows_by_id_and_divides_by_the_members_that_pushed() -> None:
    for pservers in (1, 2):
        with Cluster({"w": (2,)}, Sync(), pservers=pservers, members=3, tables=BOTH) as cluster:
            trainers = [cluster.trainer(member) for member in (1, 2, 3)]
            for number, (trainer, records) in enumerate(zip(trainers, (1, 3, 4), strict=True)):
                trainer.begin(number, records=records)
            table_of(trainers[0], USERS).push([1, 2], ones(2))
            table_of(trainers[1], USERS).push([2, 3], ones(2) * 5)
            table_of(trainers[2], ITEMS).push([1], ones(1, 3))
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda pair: pair[1].step(pair[0], {}), enumerate(trainers)))
            for number, trainer in enumerate(trainers):
                trainer.begin(number + 3)
                found = table_of(trainer, USERS).pull([1, 2, 3])
                assert found[:, 0].tolist() == [-1 / 4, -(1 + 3 * 5) / 4, -3 * 5 / 4]
            spans = [span for shard in cluster.shards for span in distinct(shard.rows.spans)]
            assert {version for shard in cluster.shards for version in shard.version_range()} == {1}
            assert all(len(set(span.numbers)) == 1024 // pservers for span in spans)


@pytest.mark.parametrize("pservers", [1, 2])
def test_a_repeated_batch_counts_once_in_rows_too(pservers: int) -> None:
    with Cluster({"w": (2,)}, Async(), pservers=pservers, tables=BOTH) as cluster:
        one = cluster.trainer()
        users = table_of(one, USERS)
        for _ in range(2):
            one.begin(7)
            users.push([1, 2, 3], ones(3))
            one.step(7, {"w": ones(1)[0]})
        one.begin(8)
        assert users.pull([1, 2, 3])[:, 0].tolist() == [-1] * 3


def test_a_batch_closed_without_a_step_still_pushes_its_rows() -> None:
    with Cluster({"w": (2,)}, Sync(), tables=BOTH) as cluster:
        one = cluster.trainer()
        users = table_of(one, USERS)
        one.begin(0)
        users.push([1], ones(1))
        one.parameters.close_batch()
        one.begin(1)
        assert users.pull([1, 2])[:, 0].tolist() == [-1, 0]


def test_rows_pushed_after_the_step_require_a_new_batch() -> None:
    with Cluster({"w": (2,)}, Sync(), tables=BOTH) as cluster:
        one = cluster.trainer()
        users = table_of(one, USERS)
        with pytest.raises(UsageError, match="no current batch"):
            users.push([1], ones(1))
        one.begin(0)
        one.parameters.step({})
        with pytest.raises(UsageError, match="already pushed for this batch"):
            users.push([1], ones(1))


@pytest.mark.parametrize("pservers", [1, 2])
def test_sums_of_several_batches_include_rows(pservers: int) -> None:
    with Cluster({"w": (1,)}, Async(push_every=2), pservers=pservers, tables=BOTH) as cluster:
        one = cluster.trainer()
        users, items = table_of(one, USERS), table_of(one, ITEMS)
        for number, records in enumerate((1, 3)):
            one.begin(number, records=records)
            users.push([1, 2 + number], ones(2) * (number + 1))
            if number:
                items.push([5], ones(1, 3))
            one.step(number, {"w": np.ones(1, np.float32)})
        one.begin(2)
        assert users.pull([1, 2, 3])[:, 0].tolist() == [-(1 + 2 * 3) / 4, -1 / 4, -2 * 3 / 4]
        first = ITEMS.init.first_values(ITEMS.key, 5, 3)
        assert np.allclose(items.pull([5])[0], np.array(first) - 1), "the mean is over batches that pushed to the table"
        for shard in cluster.shards:
            assert {shard._protocol.span(span.numbers.start).updates for span in distinct(shard.rows.spans)} == {1}


@pytest.mark.parametrize("pservers", [1, 3])
def test_a_joint_lookup_of_tables_equals_separate_lookups(pservers: int) -> None:
    with Cluster({}, Sync(), pservers=pservers, tables=BOTH) as cluster:
        one = cluster.trainer()
        users, items = table_of(one, USERS), table_of(one, ITEMS)
        one.begin(0)
        users.push(IDS, np.arange(14, dtype=np.float32).reshape(7, 2))
        items.push(IDS[:2], ones(2, 3))
        one.step(0, {})
        one.begin(1)
        for wanted in ({users: IDS, items: pa.array([7, 5, 7])}, {items: IDS[:0], users: [5]}):
            asked = asked_of(wanted)
            known = asked_of(wanted)
            assert all(known[table].distinct is asked[table].distinct for table in wanted), (
                "distinct ids are computed once"
            )
            numbers = {users: 1, items: 0}
            lookup = one.parameters.look_up({numbers[table]: found.distinct for table, found in asked.items()})
            for table, rows in zip(wanted, lookup.spread([numbers[table] for table in wanted]), strict=True):
                np.testing.assert_array_equal(rows, table.pull(wanted[table]))


@pytest.mark.parametrize("mode", [Sync(), Async()], ids=lambda mode: type(mode).__name__)
def test_rows_of_the_next_batch_arrive_with_the_step(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster({"w": (2,)}, mode, pservers=2, tables=BOTH) as cluster:
        one = cluster.trainer()
        users = table_of(one, USERS)
        one.parameters.rows.next_ids = lambda: {1: users.asked([1, 2, 3]).distinct}
        one.begin(0)
        users.push([1, 2], ones(2))
        one.step(0, {"w": ones(1)[0]})
        one.begin(1)
        monkeypatch.setattr(one.parameters, "run", None)
        assert users.pull([1, 2, 3])[:, 0].tolist() == [-1, -1, 0], "no server was called"
        with pytest.raises(TypeError):
            users.pull([1, 2])


def test_ids_of_the_next_batch_are_a_column_or_computed_from_the_batch() -> None:
    with Cluster({"w": (2,)}, Sync(), tables=[USERS]) as cluster:
        job = JobModel(Mock(), Mock())
        users = job.table(USERS)
        job._parameters, job._numbers = cluster.trainer().parameters, {"users": 0}
        batch = pa.record_batch({"k": [3, 4, 3]})
        for column in ("k", lambda batch: batch["k"].to_numpy() + 1):
            job.look_ahead({users: column}, lambda: batch)
            found = job.require_declared().rows.next_ids()
            assert found is not None
            assert found[0].ids.tolist() == ([3, 4] if column == "k" else [4, 5])
        for column, peek in (("nothing", lambda: batch), ("k", lambda: None)):
            job.look_ahead({users: column}, peek)
            assert job.require_declared().rows.next_ids() is None, "the next ids are unknown"


def test_a_lookup_after_a_loss_returns_the_present_values() -> None:
    with Cluster({"w": (2,)}, Async(), pservers=2, tables=BOTH) as cluster:
        one = cluster.trainer()
        users = table_of(one, USERS)
        one.begin(0)
        users.push(np.arange(100), ones(100))
        one.step(0, {"w": ones(1)[0]})
        cluster.replace(1, 2)
        one.begin(1)
        found = users.pull(np.arange(100))[:, 0]
        assert set(found.tolist()) == {0.0, -1.0}
        users.push(np.arange(100), ones(100))
        one.step(1, {"w": ones(1)[0]})
        one.begin(2)
        assert sorted(set((users.pull(np.arange(100))[:, 0] - found).tolist())) in ([-1.0], [-1.0, 0.0])


def test_a_lookup_after_the_membership_ended_returns_rows_and_the_batch_is_repeated() -> None:
    with Cluster({"w": (2,)}, Sync(), members=2, tables=BOTH) as cluster:
        one = cluster.trainer()
        users = table_of(one, USERS)
        current = one.begin(0)
        cluster.view(2, serial=2)
        assert (users.pull([1, 2]) == 0).all()
        assert current.must_repeat
        assert one.lost


WRONG: list[tuple[Callable[[Table], object], str, type[Exception]]] = [
    (lambda t: t.pull([1.5]), "whole numbers or texts", UsageError),
    (lambda t: t.pull([1], weights=[1.0]), "weights require bags", UsageError),
    (lambda t: t.pull([1, 2], offsets=[1]), "offsets", UsageError),
    (lambda t: t.pull([1, 2], offsets=[0, 2, 1]), "offsets", UsageError),
    (lambda t: t.pull([1, 2], offsets=[0], combiner="min"), "no combiner 'min'", UsageError),
    (lambda t: t.push([1, 2], ones(1)), r"shape \(1, 2\), not \(2, 2\)", GradientError),
    (lambda t: t.push([1], ones(1, 3)), r"shape \(1, 3\), not \(1, 2\)", GradientError),
    (lambda t: t.push([1], np.ones((1, 2), int)), "table 'users' is int64 in epoch 1, task 0, batch 0", GradientError),
    (lambda t: t.push([1], np.full((1, 2), 1e39)), "table 'users' is beyond 3.40282e", GradientError),
    (lambda t: t.push([1, 2], ones(2) * [[1.0], [np.nan]]), "id 2 of table 'users' has NaN", GradientError),
    (
        lambda t: t.push([1, 2], np.array([[1, 1], [1, np.nan]], np.float32)),
        "id 2 of table 'users' has NaN or infinity in epoch 1, task 0, batch 0",
        GradientError,
    ),
]


def test_invalid_arguments_are_reported_and_nothing_is_sent() -> None:
    with Cluster({"w": (2,)}, Sync(), tables=BOTH) as cluster:
        one = cluster.trainer()
        users = table_of(one, USERS)
        one.begin(0)
        for wrong, text, kind in WRONG:
            with pytest.raises(kind, match=text):
                wrong(users)
            assert one.current is not None
            assert one.current.is_undone == (kind is GradientError), "a script that continues gets the batch again"
            one.current.rejection = None
        users.push([1], np.ones((1, 2)))
        one.step(0, {})
        one.begin(1)
        assert users.pull([1])[0, 0] == -1


def test_an_id_without_a_row_raises_on_request() -> None:
    strict = TableSpec("strict", 2, SGD(lr=1.0), unknown="error")
    with Cluster({}, Async(), tables=[strict]) as cluster:
        one = cluster.trainer()
        table = table_of(one, strict, [strict])
        one.begin(0)
        with pytest.raises(UsageError, match="no row for id 7"):
            table.pull([7])
        table.push([7], ones(1))
        one.step(0, {})
        one.begin(1)
        assert table.pull([7])[0, 0] == -1


def test_bags_and_padding_and_nulls_are_pulled_and_pushed_the_same_way() -> None:
    with Cluster({}, Async(), pservers=2, tables=BOTH) as cluster:
        one = cluster.trainer()
        users = table_of(one, USERS)
        one.begin(0)
        column = pa.array([[1, 2], [], [2, None, 9]])
        more = {"combiner": "mean", "padding_idx": 9, "nulls": "padding"}
        assert users.pull(column, **more).shape == (3, 2)
        users.push(column, np.array([[2, 2], [5, 5], [3, 3]], np.float32), **more)
        users.push(np.array([[7, 9]]), np.ones((1, 2, 2), np.float32), padding_idx=9)
        one.step(0, {})
        one.begin(1)
        assert users.pull([1, 2, 7, 9])[:, 0].tolist() == [-1, -1 - 3, -1, 0]
        assert users.pull(np.array([[1, 9]]), padding_idx=1).tolist() == [[[-1, -1], [0, 0]]]
        assert np.allclose(users.pull([2], max_norm=1.0), -np.sqrt(0.5))
        assert users.pull(column, **(more | {"combiner": "max"}))[:, 0].tolist() == [-1, 0, -4]
        users.push(column, np.ones((3, 2), np.float32), **(more | {"combiner": "max"}))
        with pytest.raises(UsageError, match="1 nulls"):
            users.pull(column)
        one.step(1, {})
        one.begin(2)
        assert users.pull([1, 2])[:, 0].tolist() == [-2, -5]


def test_the_callers_memory_of_ids_may_be_reused() -> None:
    with Cluster({}, Async(), tables=BOTH) as cluster:
        one = cluster.trainer()
        users = table_of(one, USERS)
        ids = np.array([1, 2])
        one.begin(0)
        users.pull(ids)
        ids[:] = 3, 4
        users.push(ids, ones(2))
        one.step(0, {})
        one.begin(1)
        assert users.pull([1, 2, 3, 4])[:, 0].tolist() == [0, 0, -1, -1]
