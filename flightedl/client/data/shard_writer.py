"""Write batches to files that other jobs read, also while they are being written (``follow=True``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from flightedl.adapters.storage import open_storage
from flightedl.client import arguments
from flightedl.errors import UsageError
from flightedl.formats.convert import encoded
from flightedl.formats.readback import Readback
from flightedl.formats.registry import format_for
from flightedl.formats.schemas import schema_text
from flightedl.formats.sources import compression_of


class ShardWriter:
    """Writer of numbered files with equally many records, each of which appears complete or not at all.

    The records of the next file are in memory. They are lost if the process is killed or the ``with`` block raises an
    exception. A new writer continues with the next number: ``shards * rows_per_shard`` records were written before.
    Each process needs names of its own.

    Args:
        url: Path or URL of the files, whose ending implies their format, with ``{}`` in place of the number.
        rows_per_shard: Number of records in a file; the last one may have fewer.

    Raises:
        UsageError: the name has no ``{}`` or implies no format.
    """

    def __init__(self, url: str | Path, *, rows_per_shard: int) -> None:
        folder, _, name = arguments.url_of("url", url).rpartition("/")
        self._prefix, place, self._suffix = name.partition("{}")
        if not place or "{}" in folder + self._suffix or compression_of(name):
            raise UsageError(f"url is {str(url)!r:.200}, but must be a name such as train-{{}}.parquet, not compressed")
        self._format = format_for(name).name
        self._readback = Readback(self._format, is_lossy=False)
        self._rows_per_shard = arguments.positive("rows_per_shard", rows_per_shard)
        self._storage = open_storage(folder)
        #: Records that are not yet in a file, and their number.
        self._waiting: list[pa.Table] = []
        self._count = 0

    @property
    def shards(self) -> int:
        """Number of files that exist."""
        return len(self._numbers())

    def write(self, batch: pa.RecordBatch | pa.Table | Mapping[str, Any]) -> None:
        """Add records, and write each file that becomes complete.

        Raises:
            UsageError: the columns differ from those of earlier records.
            LossyError: the format changes values.
            UnavailableError: the store is unreachable or full. The records are kept for the next call.
        """
        try:
            table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else pa.table(batch)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise UsageError(
                f"a batch is {batch!r:.80}, which has no columns of equal length: {error!s:.100}"
            ) from None
        if self._waiting and table.schema != self._waiting[0].schema:
            found, known = (schema_text(each.schema)[:200] for each in (table, self._waiting[0]))
            raise UsageError(f"this batch has the columns {found!r}, and earlier ones have {known!r}")
        self._waiting.append(table)
        self._count += len(table)
        while self._count >= self._rows_per_shard:
            self._publish()

    def close(self) -> None:
        """Write the remaining records. Raises the same errors as ``write``."""
        while self._count:
            self._publish()

    def _publish(self) -> None:
        table = pa.concat_tables(self._waiting)
        shard = table.slice(0, self._rows_per_shard)
        batches = shard.combine_chunks().to_batches(max_chunksize=65_536)
        number = max(self._numbers(), default=-1) + 1
        parts = encoded(iter(batches), self._format, shard.schema)
        self._storage.publish(f"{self._prefix}{number:05d}{self._suffix}", self._readback.checked(parts, iter(batches)))
        self._waiting = [table.slice(len(shard))]
        self._count -= len(shard)

    def _numbers(self) -> list[int]:
        names = [file.name for file in self._storage.list(self._prefix) if file.name.endswith(self._suffix)]
        found = [name.removeprefix(self._prefix).removesuffix(self._suffix) for name in names]
        return [int(number) for number in found if number.isdecimal()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
