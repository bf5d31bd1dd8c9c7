"""Record batches of the feed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from flightedl.errors import DamagedError
from flightedl.wire.changes import CHANGES_SCHEMA, Change, decode_changes, encode_changes

CHANGES = [
    Change("values", "w", 7, 16, 18, 3, values=np.array([1.0, -2.5], np.float32)),
    Change("clear", start=3, stop=9),
    Change("rows", "users", 0, 0, 0, 0, 0, b"12345678", b"1234", b"5678", b"abcd"),
    Change("expiry", "users", 0, 0, 2, epoch=4, versions=np.array([5, 6], np.int64)),
    Change("end", block=4),
]


@pytest.mark.parametrize("count", [1, 5])
def test_changes_survive_encoding_and_decoding(count: int) -> None:
    batch = encode_changes(CHANGES[:count])
    assert batch.schema == CHANGES_SCHEMA
    batch.validate(full=True)
    for found, sent in zip(decode_changes(batch), CHANGES[:count], strict=True):
        assert found[:7] == sent[:7]
        assert [bytes(part) for part in found[7:]] == [bytes(memoryview(part)) for part in sent[7:]]


@pytest.mark.parametrize("name", ["ids", "versions", "epochs", "values"])
def test_damaged_changes_are_detected(name: str) -> None:
    batch = encode_changes(CHANGES)
    place = batch.schema.names.index(name)
    damaged = batch.set_column(place, batch.schema.field(place), pa.array([b"x"] * len(CHANGES), pa.binary()))
    with pytest.raises(DamagedError, match="do not match their checksum"):
        list(decode_changes(damaged))
