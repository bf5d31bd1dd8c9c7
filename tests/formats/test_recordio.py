from __future__ import annotations

import struct
import zlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import CorruptChunkError, IndexOptions
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.recordio import (
    DIALECTS,
    EDL,
    FLUID,
    PYRECORDIO,
    RecordIO,
    decode_chunk,
    encode_chunk,
    encode_records,
)
from flightedl.formats.records import ReadRequest
from tests.support.memory import MemoryFiles

GOLDEN = bytes.fromhex(
    "04030201873a67950000000011000000020000000500000031323334350400000031323334"
    "040302019a5680f2000000000600000001000000020000003132"
)


def read_all(content: bytes, options: IndexOptions | None = None) -> list[bytes]:
    files = MemoryFiles({"a.recordio": content})
    stat = files.expand(["a.recordio"])[0]
    index = RecordIO().index(files, stat, options or IndexOptions())
    chunks = ChunkIndex([index], index.schema)
    found: list[bytes] = []
    for number in range(len(chunks)):
        chunk = chunks.chunk(number)
        assert chunk.first_record == len(found)
        found += RecordIO().read(files, chunk, ReadRequest(index.schema)).table.column("record").to_pylist()
    return found


def test_the_golden_file_is_written_and_read() -> None:
    assert len(GOLDEN) == 63
    assert b"".join(encode_records([b"12345", b"1234", b"12"], "none", max_chunk_bytes=10)) == GOLDEN
    assert read_all(GOLDEN) == [b"12345", b"1234", b"12"]
    files = MemoryFiles({"a.recordio": GOLDEN})
    index = RecordIO().index(files, files.expand(["a.recordio"])[0], IndexOptions())
    assert index.chunks.offset.tolist() == [0, 37]
    assert index.chunks.records.tolist() == [2, 1]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("compressor", ["none", "snappy", "gzip"])
@given(records=st.lists(st.binary(max_size=30), min_size=1, max_size=20), limit=st.integers(1, 100))
@settings(max_examples=10, deadline=None)
def test_every_dialect_and_compressor_is_read(dialect: Any, compressor: str, records: list[bytes], limit: int) -> None:
    content = b"".join(encode_records(records, compressor, limit, dialect))
    assert read_all(content) == records


def test_the_historic_layouts_are_read_byte_by_byte() -> None:
    payload = struct.pack("<I", 2) + b"hi"
    assert FLUID.header(encode_chunk([b"hi"], "none", FLUID)[:20]) == EDL.header(
        encode_chunk([b"hi"], "none", EDL)[:20]
    )
    assert (
        encode_chunk([b"hi"], "none", PYRECORDIO)
        == struct.pack("<5I", 0x01020304, 1, PYRECORDIO.checksum(payload), 1, 6) + payload
    )


def test_empty_records_and_empty_files_are_legal() -> None:
    assert read_all(b"".join(encode_records([b"", b"", b"x", b""]))) == [b"", b"", b"x", b""]
    assert read_all(b"") == []
    assert list(encode_records([])) == []


def test_an_empty_first_chunk_does_not_hide_the_dialect() -> None:
    content = encode_chunk([], "none", FLUID) + encode_chunk([b"a", b"b"], "gzip", FLUID)
    assert read_all(content) == [b"a", b"b"]


@pytest.mark.parametrize("cut", [1, 19, 25, 36])
def test_a_truncated_single_chunk_is_reported(cut: int) -> None:
    with pytest.raises(CorruptChunkError, match=r"a\.recordio"):
        read_all(GOLDEN[:cut])


@pytest.mark.parametrize(
    ("cut", "text"), [(40, "ends within a header"), (62, "1 bytes are missing"), (57, "6 bytes are")]
)
def test_a_truncated_last_chunk_names_file_and_offset(cut: int, text: str) -> None:
    with pytest.raises(DataError, match=rf"a\.recordio is corrupt, chunk at byte 37: the file is truncated.*{text}"):
        read_all(GOLDEN[:cut])


def test_a_flipped_bit_names_file_and_offset() -> None:
    damaged = bytearray(GOLDEN)
    damaged[60] ^= 1
    with pytest.raises(CorruptChunkError, match=r"a\.recordio is corrupt, chunk at byte 37: the checksum does not"):
        read_all(bytes(damaged))
    damaged = bytearray(GOLDEN)
    damaged[30] ^= 1
    with pytest.raises(CorruptChunkError, match=r"chunk at byte 0: its checksum does not match"):
        read_all(bytes(damaged))


@given(st.integers(0, len(GOLDEN) - 1), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_every_flipped_byte_is_detected(place: int, flip: int) -> None:
    damaged = bytearray(GOLDEN)
    damaged[place] ^= flip
    with pytest.raises(DataError, match=r"a\.recordio"):
        read_all(bytes(damaged))


def test_a_chunk_with_a_wrong_record_count_is_corrupt() -> None:
    damaged = bytearray(GOLDEN)
    damaged[53] = 0
    with pytest.raises(DataError, match=r"a\.recordio is corrupt, chunk at byte 37"):
        read_all(bytes(damaged))


def test_a_file_of_another_format_is_rejected() -> None:
    with pytest.raises(DataError, match=r"a\.recordio is not a RecordIO file"):
        read_all(b"PAR1" * 20)


def test_damage_within_the_payload_is_detected() -> None:
    chunk = bytearray(encode_chunk([b"abc"], "none"))
    struct.pack_into("<I", chunk, 20, 99)
    struct.pack_into("<I", chunk, 4, zlib.crc32(bytes(chunk[20:])))
    with pytest.raises(ValueError, match="record 0 is longer than its chunk"):
        decode_chunk(bytes(chunk))


def test_skipping_keeps_the_records_before_the_damage() -> None:
    files = MemoryFiles({"a.recordio": GOLDEN[:50]})
    index = RecordIO().index(files, files.expand(["a.recordio"])[0], IndexOptions(skip_corrupt=True))
    assert index.chunks.records.tolist() == [2]
    assert len(index.skipped) == 1
    assert "byte 37" in index.skipped[0]


def test_an_unknown_compressor_is_rejected() -> None:
    with pytest.raises(UsageError, match="no compressor 'lzma': use one of none, snappy, gzip"):
        encode_chunk([b""], "lzma")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (bytes([255] * 32), 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_crc32c_matches_rfc_3720(data: bytes, expected: int) -> None:
    assert PYRECORDIO.checksum(data) == expected


def test_each_chunk_has_as_many_records_as_fit() -> None:
    chunks = list(encode_records([b"12345"] * 7, "none", max_chunk_bytes=10))
    assert [len(decode_chunk(chunk)) for chunk in chunks] == [2, 2, 2, 1]


def test_each_batch_becomes_a_chunk() -> None:
    table = pa.table({"record": [b"%d" % number for number in range(10)]})
    files = MemoryFiles({"a.recordio": b"".join(RecordIO().write(table.to_batches(max_chunksize=4), table.schema))})
    index = build_index(files, DatasetSpec(("a.recordio",)))
    assert [index.chunk(number).records for number in range(len(index))] == [4, 4, 2]
