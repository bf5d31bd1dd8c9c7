"""Transforms imported by readers in tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pyarrow as pa


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the doubled numbers and this process's id. Smaller numbers take longer."""
    first = batch["n"][0].as_py()
    time.sleep(0.02 if first % 4 == 0 else 0)
    numbers = [2 * number for number in batch["n"].to_pylist()]
    return pa.record_batch({"n": numbers, "pid": [os.getpid()] * len(numbers)})


def broken_at_seven(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Raise at the number 7."""
    if 7 in batch["n"].to_pylist():
        raise ValueError("no sevens, please")
    return batch


def deadly_at_seven(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Kill the process at the number 7."""
    if 7 in batch["n"].to_pylist():
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def deadly_once(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Kill the process at the number 7 if a file exists, and remove the file."""
    mark = Path(batch.schema.metadata[b"mark"].decode())
    if 7 in batch["n"].to_pylist() and mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def two_milliseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Compute in Python for 2 ms of the processor's time."""
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
    return batch


def text_of(batch: pa.RecordBatch) -> str:
    """Return an object that is not a batch."""
    return str(batch)


def words(batch: pa.RecordBatch) -> pa.Table:
    """Return a table with words of a dictionary."""
    column = pa.array([f"word {number % 3}" for number in batch["n"].to_pylist()]).dictionary_encode()
    return pa.table({"word": column})


def negative(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the negative ids."""
    return pa.record_batch({"id": [-number for number in batch["id"].to_pylist()]})


def broken_at_fifty(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Raise at the id 50."""
    if 50 in batch["id"].to_pylist():
        raise ValueError("no fifties, please")
    return batch


def endless_after_fifty(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Never return from an id of 50 or more."""
    if max(batch["id"].to_pylist()) >= 50:
        time.sleep(3600)
    return batch


def halved(index: int) -> dict[str, float]:
    """Return an element that names its process; raise at the index 7."""
    if index == 7:
        raise ValueError("no sevens, please")
    return {"half": index / 2, "pid": os.getpid()}


def squared(index: int) -> dict[str, int]:
    """Return an index with its square."""
    return {"index": index, "square": index * index}
