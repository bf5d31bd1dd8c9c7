"""Ranges of indices, the "files" of a map-style dataset: a function in the user's script maps indices to elements.

The URL ``indexed://0-50000`` stands for the indices 0 to 49,999 in ascending order, and ``indexed://0-50000/shuffled``
for the same indices in a random order that never changes. Nothing is stored: the records, with the column ``index``,
are computed.

A task consists of consecutive records. The fixed random order makes each task a random sample of the range, even if the
elements are sorted by label. As in every dataset, tasks and their records are shuffled again in each epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.domain.queue.permutation import KeyedPermutation, key_of
from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import Chunk, ChunkColumns, FileIndex, IndexOptions
from flightedl.formats.records import ReadRequest, Records, select
from flightedl.ports import Files, FileStat

SCHEMA = pa.schema([("index", pa.int64())])
_URL = re.compile(r"indexed://(\d+)-(\d+)(/shuffled)?")
_KEY = key_of(0)
_TASK_RECORDS, _LEAST_TASKS, _MOST_TASKS = 1024, 256, 1_000_000
#: Maximum number of chunks of a range. Each chunk takes 40 bytes of the master's memory.
_CHUNKS_LIMIT = 20_000_000


def url_of(indices: range, *, is_shuffled: bool) -> str:
    """Return the URL of a range of consecutive indices."""
    return f"indexed://{indices.start}-{indices.stop}{'/shuffled' if is_shuffled else ''}"


def task_records(count: int, batch_size: int = 1) -> int:
    """Return the default number of records per task: a whole number of batches, and small enough for many trainers."""
    wanted = max(min(_TASK_RECORDS, -(-count // _LEAST_TASKS)), -(-count // _MOST_TASKS))
    return -(-wanted // batch_size) * batch_size


def is_of_indices(url: str) -> bool:
    """True if the URL names a range of indices."""
    return _URL.fullmatch(url) is not None


def indices_of(url: str, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the indices in the records with these numbers, (len(numbers),)."""
    indices, is_shuffled = _parsed(url)
    return indices.start + (KeyedPermutation(len(indices), _KEY).elements_at(numbers) if is_shuffled else numbers)


class Indices:
    """The format of these "files", which ``job.indexed`` declares."""

    name: ClassVar[str] = "indexed"
    suffixes: ClassVar[tuple[str, ...]] = ()

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:  # noqa: ARG002 - see Format
        count = len(_parsed(stat.url)[0])
        most = options.max_records_per_chunk or task_records(count)
        if count > most * _CHUNKS_LIMIT:
            raise DataError(f"{stat.url} would have {-(-count // most):,} tasks: choose a larger records_per_task")
        return FileIndex(stat, self.name, SCHEMA, ChunkColumns.of([count], [0], [count]).split(most), mark=stat.url)

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:  # noqa: ARG002 - see Format
        numbers = np.arange(chunk.first_record, chunk.first_record + chunk.records)
        return select(pa.table([indices_of(chunk.url, numbers)], SCHEMA), request)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:  # noqa: ARG002 - see Format
        raise UsageError("a range of indices is not a file: choose another format")


def _parsed(url: str) -> tuple[range, bool]:
    found = _URL.fullmatch(url)
    if found is None:
        raise DataError(f"{url} names no range of indices: declare elements by their indices with job.indexed")
    return range(int(found[1]), int(found[2])), found[3] is not None
