"""Local steps: slices of a batch, and one push of the difference to the job's values."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flightedl as fe
from flightedl.client.data.slices import Slices
from flightedl.client.model.parameters import Parameters
from flightedl.client.model.trees import tree_of
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.errors import GradientError, UsageError

from ..support.etcd_server import EtcdServer
from .pserver_bench import Cluster, Trainer

EVERY = 3
ONE = np.ones(2, np.float32)


def batch_of(records: int) -> pa.RecordBatch:
    return pa.record_batch({"k": np.arange(records)})


class Local:
    """A trainer that makes local steps on two values."""

    def __init__(self, cluster: Cluster, member: int = 1, every: int = EVERY, **more: object) -> None:
        self.trainer: Trainer = cluster.trainer(member, **more)
        self.model: Parameters = self.trainer.parameters
        self.slices = self.model.slices = Slices(every)

    def begin(self, batch: int, records: int = EVERY) -> Iterator[pa.RecordBatch]:
        self.trainer.begin(batch, records=records)
        return self.slices.of(batch_of(records))

    def train(self, batch: int, by: float, records: int = EVERY) -> None:
        """Add ``by`` to all values in each local step, and end the batch."""
        own = None
        for _ in self.begin(batch, records):
            own = self.model.local_values(own)
            own = {name: value + by for name, value in own.items()}
            self.model.local_step(own)
        self.model.close_batch()


def cluster(mode: Mode | None = None, members: int = 1, **more: object) -> Cluster:
    return Cluster({"w": (2,)}, mode or Sync(), members=members, optimizer=fe.SGD(lr=1.0), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("records", "sizes"), [(7, [3, 3, 1]), (6, [3, 3]), (3, [3]), (1, [1]), (0, [0])], ids=str)
def test_slices_have_all_records_in_order(records: int, sizes: list[int]) -> None:
    slices = Slices(EVERY)
    slices.size = 3
    found, are_open = [], []
    for each in slices.of(batch_of(records)):
        found.append(each)
        are_open.append(slices.are_open)
    assert [len(each) for each in found] == sizes
    assert [value for each in found for value in each["k"].to_pylist()] == list(range(records))
    assert are_open == [True] * (len(sizes) - 1) + [False]
    assert (slices.number, slices.count) == (0, 0)


def test_a_loop_that_is_left_leaves_no_slice_open() -> None:
    slices = Slices(EVERY)
    loop = slices.of(batch_of(3))
    next(loop)
    assert slices.are_open
    loop.close()
    assert not slices.are_open


@pytest.mark.parametrize("mode", [Sync(), Async()], ids=["sync", "async"])
def test_only_the_last_local_step_pushes(mode: Mode) -> None:
    with cluster(mode) as made:
        local = Local(made)
        own = None
        for number, _ in enumerate(local.begin(0)):
            own = local.model.local_values(own)
            assert own["w"].tolist() == [number, number]
            own = {"w": own["w"] + 1}
            local.model.local_step(own)
            assert local.model["w"].tolist() == ([3, 3] if number == 2 else [0, 0])
        local.model.close_batch()
        local.train(1, by=-1.0)
        assert local.model["w"].tolist() == [0, 0]


def test_the_mean_of_a_round_weighs_differences_by_records() -> None:
    with cluster(members=2) as made:
        one, other = Local(made, 1), Local(made, 2)
        with ThreadPoolExecutor() as pool:
            for each in (pool.submit(one.train, 0, 1.0), pool.submit(other.train, 1, 7.0, records=1)):
                each.result(20.0)
        # 3 records moved by 3, and 1 record by 7.
        assert one.model["w"].tolist() == other.model["w"].tolist() == [4, 4]


def test_a_batch_begins_with_values_that_arrived_after_the_last_one() -> None:
    with cluster(Async(), members=2) as made:
        local, other = Local(made, 1), Local(made, 2)
        local.train(0, by=1.0)
        other.train(1, by=1.0)
        local.model.pull()
        local.train(2, by=1.0)
        assert local.model["w"].tolist() == [9, 9]


def test_values_are_copies_in_the_declared_containers() -> None:
    tree = tree_of({"w": [ONE * 0]})
    with Cluster({"w.0": (2,)}, Sync(), optimizer=fe.SGD(lr=1.0)) as made:
        local = Local(made, tree=tree)
        own = None
        for _ in local.begin(0):
            own = local.model.local_values(own)
            own["w"][0] += 1
            local.model.local_step(own)
        assert local.model["w.0"].tolist() == [3, 3]


def test_a_pull_between_local_steps_is_refused() -> None:
    with cluster() as made:
        local = Local(made)
        loop = local.begin(0)
        next(loop)
        with pytest.raises(UsageError, match="a pull between local steps would drop them"):
            local.model.pull()
        own = local.model.local_values()
        for _ in loop:
            pass
        local.model.pull()
        assert own["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"w": np.full(2, np.nan, np.float32)}, "not finite|NaN"),
        ({"w": np.float32(1)}, "shape"),
        ({"w": ["a", "b"]}, "type|float"),
        ({"v": ONE}, "'v'"),
        ([ONE], "must be|mapping|dict"),
    ],
    ids=["nan", "shape", "text", "name", "list"],
)
def test_wrong_values_are_rejected_and_the_batch_begins_again(values: object, said: str) -> None:
    with cluster() as made:
        local = Local(made, every=1)
        next(local.begin(0))
        local.model.local_values()
        with pytest.raises((GradientError, UsageError), match=said):
            local.model.local_step(values)
        assert local.model["w"].tolist() == [0, 0]
        local.train(0, by=1.0, records=1)
        assert local.model["w"].tolist() == [1, 1]


def test_local_steps_must_be_declared_and_must_begin_with_the_jobs_values() -> None:
    with cluster() as made:
        local = Local(made)
        with pytest.raises(UsageError, match="no current batch"):
            local.model.local_values()
        for _ in local.begin(0):
            if not local.slices.are_open:
                with pytest.raises(UsageError, match=r"begin each local step with `values = model\.local_values"):
                    local.model.local_step({"w": ONE})
        local.model.slices = None
        with pytest.raises(UsageError, match=r"has no local steps: declare them, as in job\.parameters"):
            local.model.local_step({"w": ONE})


@pytest.mark.etcd
def test_a_session_yields_slices_and_refuses_what_has_no_local_steps(etcd: EtcdServer, job_name: str) -> None:
    zeros = {"w": np.zeros(10)}

    def declared(job: Any, **more: Any) -> Parameters:
        found: Parameters = job.parameters(zeros, optimizer=fe.SGD(lr=1.0), local_steps=2, **more)
        return found

    with fe.local(pservers=1, job=job_name, etcd=etcd.address) as cluster, cluster.connect() as job:
        for wrong in (0, 1.5, True):
            with pytest.raises(UsageError, match="local_steps"):
                job.parameters(zeros, local_steps=wrong)
        with pytest.raises(UsageError, match="no push_every: raise local_steps instead"):
            declared(job, mode=Async(push_every=2))
        model = declared(job)
        with pytest.raises(UsageError, match="steps_per_batch would repeat all local steps of a batch"):
            job.indexed(10, lambda index: {"k": index}, batch_size=2, steps_per_batch=2)
        own, sizes, data = None, [], job.indexed(10, lambda index: {"k": index}, batch_size=3, records_per_task=10)
        for batch in data:
            own = model.local_values(own)
            own["w"][batch["k"].to_numpy()] += 1
            model.local_step(own)
            sizes.append(batch.num_rows)
        # Outer batches have 6 and 4 records.
        assert (sizes, model["w"].tolist()) == ([3, 3, 3, 1], [1.0] * 10)
    with fe.local(pservers=1, job=f"{job_name}-data", etcd=etcd.address) as cluster, cluster.connect() as job:
        job.indexed(10, lambda index: {"k": index}, batch_size=3)
        with pytest.raises(UsageError, match=r"declare a model with local steps before job\.dataset"):
            declared(job)
    with fe.local(pservers=1, job=f"{job_name}-rows", etcd=etcd.address) as cluster, cluster.connect() as job:
        job.table("rows", 2, optimizer=fe.SGD(lr=1.0))
        with pytest.raises(UsageError, match="no tables, whose rows have no local copy"):
            declared(job)
