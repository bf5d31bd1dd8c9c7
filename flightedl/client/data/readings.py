"""Reads the batches of a task.

In which order records are read is said by who hands the task out, for it depends on the epoch: this trainer's own
declaration may name a seed that does not count yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from flightedl.domain.trainer.feed import AssignedTask
from flightedl.formats.chunks import chunks_from_rows
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.reader import read_task
from flightedl.ports import Files


def batches_of(files: Files, task: AssignedTask, spec: DatasetSpec, **more: Any) -> Iterator[pa.RecordBatch]:
    """The batches of a task in their order; ``more`` as of ``read_task``."""
    a = task.assignment
    chunks = chunks_from_rows(a.chunks)
    return read_task(files, chunks, spec, a.seed, a.epoch, a.task, a.first_batch, a.end_batch, **more)
