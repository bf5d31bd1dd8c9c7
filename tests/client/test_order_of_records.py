"""A trainer reads records in the order of its assignment, regardless of the seed that it declared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.data.dataset import Dataset
from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.losses import LostData
from flightedl.client.data.reading import batches_of
from flightedl.client.waiting import Waiting
from flightedl.domain.queue.batching import record_order
from flightedl.domain.trainer.batches import Batch, BatchState
from flightedl.domain.trainer.feed import Ask
from flightedl.formats.chunks import chunks_to_rows
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.registry import named_format
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset
from flightedl.messages.tasks import Assignment, TasksReply
from tests.support.memory import MemoryFiles

RECORDS = 12


class Listener:
    def __init__(self) -> None:
        self.places: list[str] = []

    def open_batch(self, _: Batch, place: Callable[[], str]) -> bool:
        self.places.append(place())
        return True

    def close_batch(self) -> tuple[BatchState, ...]:
        return ()

    def push_sum(self) -> tuple[BatchState, ...]:
        return ()

    def give_up_sum(self) -> tuple[BatchState, ...]:
        return ()

    lost = LostData()

    def loop_over(self) -> None: ...


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_seed_of_the_assignment_is_used(seed: int | None) -> None:
    table = pa.table({"k": range(RECORDS)}).to_batches()
    files = MemoryFiles({"a.parquet": b"".join(named_format("parquet").write(table, table[0].schema))})
    spec = DatasetSpec(("a.parquet",), batch_size=1)
    chunks = chunks_to_rows(TaskLayout(build_index(files, spec), 1).chunks_of(0))
    assignment = Assignment(
        epoch=1,
        position=0,
        task=0,
        attempt=1,
        first_batch=0,
        end_batch=RECORDS,
        batch_count=RECORDS,
        chunks=chunks,
        seed=seed,
    )
    todo = [assignment]

    def fetch(ask: Ask) -> TasksReply:
        given, todo[:] = todo[:], []
        outcome = "given" if given else "none_now" if ask.holding else "epochs_done"
        return TasksReply(assignments=given, outcome=outcome)

    clock, listener = SystemClock(), Listener()
    declaration = DatasetDeclaration(urls=["a.parquet"], batch_size=1, shuffle=True, seed=9)
    declared = DeclaredDataset(index_hash="", task_count=1, record_count=RECORDS, schema="", declaration=declaration)
    data = Dataset(
        declared,
        lambda: TaskFeed(fetch, lambda: None, clock),
        partial(batches_of, files, spec=spec, schema=table[0].schema),
        listener,
        lambda: Waiting(clock, 5.0, 5.0, lambda _: None),
        5.0,
        lambda: None,
    )
    seen = [batch.column("k")[0].as_py() for batch in data]
    order = list(range(RECORDS)) if seed is None else record_order(RECORDS, seed, 1, 0).tolist()
    assert seen == order
    assert listener.places == [f"a.parquet, records {k}" for k in order]
