"""A dataset as trainers declare it on the wire, as the formats take it."""

from __future__ import annotations

import base64
from pathlib import Path

import pyarrow as pa

from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset


def spec_of(declared: DatasetDeclaration) -> DatasetSpec:
    """The same dataset. Chunks longer than a task are cut.

    Raises:
        UsageError: a field is out of range.
    """
    return DatasetSpec(
        urls=tuple(declared.urls),
        format=declared.format,
        columns=None if declared.columns is None else tuple(declared.columns),
        filter=tuple(tuple(condition) for condition in declared.filter or ()),
        batch_size=declared.batch_size,
        steps_per_batch=declared.steps_per_batch,
        on_corrupt=declared.on_corrupt,
        max_records_per_chunk=declared.records_per_task,
    )


def schema_of(declared: DeclaredDataset) -> pa.Schema:
    """Arrow schema of a dataset's records, all columns."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(declared.schema)))


def absolute_url(url: str) -> str:
    """The same file from wherever it is read: a relative local path means this process's directory."""
    return url if "://" in url or url.startswith("/") else str(Path.cwd() / url)
