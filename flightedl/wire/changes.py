"""Record batches of the feed. Each row is a part of a base or increment; the parts are applied in this order.

Columns that are not listed for a kind are 0 or empty. Bytes are little-endian. The kinds are:

* ``values``: elements ``start`` to ``stop`` of the parameter ``name``, in its dtype or the ticket's ``wire``. They form
  the block with number ``block``, at ``version``.
* ``clear``: the buckets ``start`` to ``stop`` are complete in this message, so first remove all of their rows.
* ``removed``: ``ids`` (uint64) of removed rows of the table ``name``
* ``rows``: rows of the table ``name``: ``ids`` (uint64), ``versions`` and ``epochs`` (uint32) of their last updates,
  and ``values`` (n * dim elements in the table's dtype or the ticket's ``wire``)
* ``expiry``: rows of the table ``name`` that have expired. In the buckets ``start`` to ``stop``, these are the rows
  whose version is lower than their bucket's entry in ``versions`` (int64), or whose epoch is lower than ``epoch``.
* ``end``: the message is complete. ``block`` is the number of its other rows.

``checksum`` is the xxh3-64 of ``ids``, ``versions``, ``epochs`` and ``values``, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from flightedl.errors import DamagedError

#: Anything with the buffer protocol.
Buffer = Any

CHANGES_SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in (
            ("kind", pa.string()),
            ("name", pa.string()),
            ("block", pa.int64()),
            ("start", pa.int64()),
            ("stop", pa.int64()),
            ("version", pa.int64()),
            ("epoch", pa.int64()),
            ("checksum", pa.uint64()),
            ("ids", pa.binary()),
            ("versions", pa.binary()),
            ("epochs", pa.binary()),
            ("values", pa.binary()),
        )
    ]
)
#: Key of the ``ChangesHeader`` in the schema's metadata.
HEADER_KEY = b"flightedl.changes"


class Change(NamedTuple):
    """A row of the feed, as described in the module."""

    kind: str
    name: str = ""
    block: int = 0
    start: int = 0
    stop: int = 0
    version: int = 0
    epoch: int = 0
    ids: Buffer = b""
    versions: Buffer = b""
    epochs: Buffer = b""
    values: Buffer = b""

    @property
    def checksum(self) -> int:
        digest = xxhash.xxh3_64()
        for part in self[7:]:
            digest.update(part)
        return digest.intdigest()


def encode_changes(changes: Sequence[Change]) -> pa.RecordBatch:
    """Return the batch of these changes. If there is only one change, its bytes are not copied."""
    columns = [pa.array([change[place] for change in changes], CHANGES_SCHEMA.field(place).type) for place in range(7)]
    columns.append(pa.array([change.checksum for change in changes], pa.uint64()))
    columns += [_binary([change[place] for change in changes]) for place in range(7, 11)]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGES_SCHEMA)


def _binary(values: Sequence[Buffer]) -> pa.Array:
    views = [memoryview(value).cast("B") for value in values]
    offsets = np.array([0, *accumulate(view.nbytes for view in views)], np.int32)
    data = views[0] if len(views) == 1 else b"".join(views)
    return pa.Array.from_buffers(pa.binary(), len(views), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def decode_changes(batch: pa.RecordBatch) -> Iterator[Change]:
    """Yield the changes in a batch. Raises DamagedError if a change does not match its checksum."""
    fixed = [batch.column(place).to_pylist() for place in range(8)]
    for row in range(batch.num_rows):
        *values, checksum = (column[row] for column in fixed)
        found = Change(*values, *(batch.column(place)[row].as_buffer() for place in range(8, 12)))
        if found.checksum != checksum:
            raise DamagedError(f"changes of {found.name!r:.80} do not match their checksum: they are sent again")
        yield found
