"""The declaration of ``push_every`` reports how many batches a push has, and refuses far fewer than that."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.data.job_data import JobData
from flightedl.client.data.options import Reading
from flightedl.client.data.slices import Slices
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.errors import UsageError
from flightedl.formats.layout import TaskLayout
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset


def layout(*records: int, batch_size: int = 10, steps_per_batch: int = 1) -> TaskLayout:
    """Return a layout with these records in its tasks."""
    chunks = type("Chunks", (), {"records": np.array(records, np.int64), "__len__": lambda _: len(records)})()
    return TaskLayout(cast("Any", chunks), batch_size, steps_per_batch=steps_per_batch)


def declared(
    task_batches: list[tuple[int, int]],
    mode: Mode | None = None,
    record_count: int = 1,
    slices: Slices | None = None,
    **options: Any,
) -> JobData:
    """Return a session's data after the declaration of a dataset, before which ``mode`` was declared, if any."""
    declaration = DatasetDeclaration(urls=["x.csv"], batch_size=10)
    schema = base64.b64encode(pa.schema([("x", pa.int64())]).serialize().to_pybytes()).decode()
    reply = DeclaredDataset(
        index_hash="",
        task_count=1,
        record_count=record_count,
        schema=schema,
        declaration=declaration,
        task_batches=task_batches,
    )
    process = SimpleNamespace(
        clock=SystemClock(),
        ask_master=lambda *_: reply,
        waiting=None,
        recorder=None,
        trainer="t",
        progress=None,
        data_moved={},
    )
    participation = SimpleNamespace(require_lease=None)
    data = JobData(cast("Any", process), cast("Any", participation), lambda: None, "", cast("Any", None))
    if mode is not None:
        data.expect_pushes(mode)
    data.declare(declaration, Reading(options), slices)
    return data


def test_an_index_counts_the_batches_of_its_tasks() -> None:
    assert layout(10, 11, 20, 95).task_batches() == [(1, 1), (2, 2), (10, 1)]
    assert layout(10, 11, steps_per_batch=3).task_batches() == [(3, 1), (6, 1)]
    assert layout().task_batches() == []
    many = layout(*range(1, 200_000, 7), batch_size=1).task_batches()
    assert sum(tasks for _, tasks in many) == len(range(1, 200_000, 7))
    assert len(many) < 2500, "large numbers are rounded"


@pytest.mark.parametrize("mode", [Async(push_every=8), Sync(push_every=8)], ids=["async", "sync"])
def test_a_mode_with_far_shorter_pushes_is_refused(mode: Mode, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"with push_every=8, a push has 3\.0 batches on average, .* two tasks: make"):
        declared([(3, 100)]).expect_pushes(mode)
    with pytest.raises(UsageError, match=r"permit it by job\.dataset\(\.\.\., short_pushes=True\)"):
        declared([(3, 100)], mode)
    assert capsys.readouterr().err == ""
    declared([(3, 100)], short_pushes=True).expect_pushes(mode)
    declared([(4, 100)]).expect_pushes(mode)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "flightedl: with push_every=8, a push has 3.0 batches on average"
    assert second == "flightedl: with push_every=8, a push has 4.0 batches on average"


@pytest.mark.parametrize("mode", [Async(), Sync(), Bounded(3)], ids=["async", "sync", "bounded"])
def test_other_modes_report_nothing(mode: Mode, capsys: pytest.CaptureFixture[str]) -> None:
    declared([(1, 100)]).expect_pushes(mode)
    assert capsys.readouterr().err == ""


def test_nothing_is_refused_before_the_data_are_known() -> None:
    declared([]).expect_pushes(Async(push_every=8))


def in_slices(records: int, task_batches: list[tuple[int, int]], every: int, **options: Any) -> Slices:
    """Declare data whose batches have slices of 10 records. Return the slices."""
    slices = Slices(every)
    declared(task_batches, record_count=records, slices=slices, **options)
    return slices


def test_the_declaration_reports_how_many_local_steps_a_batch_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_slices(1000, [(2, 10)], every=8).size == 10
    with pytest.raises(UsageError, match=r"with 8 local steps, an outer batch has 3\.0 on average, .* two tasks: make"):
        in_slices(300, [(1, 10)], every=8)
    in_slices(300, [(1, 10)], every=8, short_pushes=True)
    in_slices(10, [], every=8)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"flightedl: with 8 local steps, an outer batch has {mean} on average" for mean in ("5.0", "3.0")]
