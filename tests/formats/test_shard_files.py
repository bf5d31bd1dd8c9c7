"""Files of a checkpoint: intact ones are read back unchanged, damaged ones never load."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import xxhash

from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.errors import CorruptError, ExhaustedError, NotFoundError, UnavailableError
from flightedl.formats import shard_files
from flightedl.formats.row_batches import StoredRows, StoredRowSpan, decode_rows, row_checksum
from flightedl.formats.shard_files import (
    _LARGE_BYTES,
    ShardHeader,
    StoredBlock,
    _hashed,
    load_shard,
    read_blocks,
    read_rows,
    write_shard,
)
from tests.support.memory import MemoryStorage

NAME = "c-1/shard-0-of-1-5-1.arrow"


def make_blocks(count=5, elements=300, seed=0) -> list[StoredBlock]:
    rng = np.random.default_rng(seed)
    blocks = []
    for i in range(count):
        dtype = "float32" if i % 2 == 0 else "float64"
        slots = tuple(rng.random(elements).astype(dtype) for _ in range(i % 3))
        blocks.append(
            StoredBlock(3 * i, i, 10 * i, 10 * i + elements, 7 + i, 4, rng.random(elements).astype(dtype), slots)
        )
    return blocks


def make_applied(count=5) -> bytes:
    applied = AppliedBatches(range(count))
    applied.mark(range(count), Batch(0, 3, 1), 4)
    return applied.encode()


def write(storage, blocks):
    header = ShardHeader(job="j", number=1, index=0, pservers=1, plan_hash="ab", blocks=[b.number for b in blocks])
    return write_shard(storage, NAME, header, make_applied(len(blocks)), iter(blocks), 2)


def same(one: StoredBlock, other: StoredBlock) -> bool:
    numbers = ("number", "parameter", "start", "stop", "version", "updates")
    arrays = zip((one.values, *one.slots), (other.values, *other.slots), strict=True)
    return all(getattr(one, n) == getattr(other, n) for n in numbers) and all(
        a.dtype == b.dtype and (a == b).all() for a, b in arrays
    )


def load(storage, written):
    header, applied, blocks = load_shard(storage, NAME, written.size_bytes, written.hash)
    return header, applied, list(blocks)


def test_a_shard_survives_writing_and_reading():
    storage, blocks = MemoryStorage(), make_blocks()
    written = write(storage, blocks)
    assert written.size_bytes == len(storage.files[NAME])
    header, applied, found = load(storage, written)
    assert header.blocks == [block.number for block in blocks]
    assert AppliedBatches.decode(applied, range(5)).has(4, Batch(0, 3, 1))
    assert all(same(one, other) for one, other in zip(blocks, found, strict=True))


def test_a_shard_without_blocks_is_valid():
    storage = MemoryStorage()
    assert load(storage, write(storage, []))[2] == []


def test_any_arrow_reader_opens_a_shard_file():
    storage = MemoryStorage()
    write(storage, make_blocks())
    table = pa.ipc.open_file(pa.py_buffer(storage.files[NAME])).read_all()
    assert table.column("block").to_pylist() == [0, 3, 6, 9, 12]


def test_only_requested_blocks_are_read():
    class Counting(MemoryStorage):
        read_bytes = 0

        def read_range(self, name, offset, length):
            self.read_bytes += length
            return super().read_range(name, offset, length)

    storage, blocks = Counting(), make_blocks(count=12, elements=100_000)
    written = write(storage, blocks)
    contents = read_blocks(storage, NAME, written.size_bytes, [12, 33])
    assert [block.number for block in contents.blocks] == [12, 33]
    assert same(contents.blocks[0], blocks[4])
    assert same(contents.blocks[1], blocks[11])
    needed = sum(array.nbytes for i in (4, 11) for array in (blocks[i].values, *blocks[i].slots))
    assert storage.read_bytes < needed + 600_000
    with pytest.raises(CorruptError, match="no block 1"):
        read_blocks(storage, NAME, written.size_bytes, [1])


def test_blocks_are_written_without_a_copy():
    """The parts that the storage receives are the block's own memory."""
    blocks = make_blocks(count=1, elements=50_000)
    places = []

    class Looking(MemoryStorage):
        def publish(self, name, parts):
            collected = []
            for part in parts:
                if memoryview(part).nbytes == blocks[0].values.nbytes:
                    places.append(np.frombuffer(part, np.uint8).ctypes.data)
                collected.append(bytes(part))
            return super().publish(name, collected)

    write(Looking(), blocks)
    assert blocks[0].values.ctypes.data in places


def mutations(data: bytes, count: int, seed: int):
    rng = random.Random(seed)
    for _ in range(count):
        mutated, at = bytearray(data), rng.randrange(len(data))
        kind = rng.randrange(5)
        if kind <= 1:
            mutated[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del mutated[at:]
        elif kind == 3:
            mutated[at : at + 64] = bytes(64)
        else:
            mutated[at:at] = rng.randbytes(rng.randrange(1, 9))
        if mutated != data:
            yield bytes(mutated)


def test_no_damaged_file_is_ever_loaded():
    storage, blocks = MemoryStorage(), make_blocks(elements=40)
    written = write(storage, blocks)
    for mutated in mutations(storage.files[NAME], 1500, seed=1):
        damaged = MemoryStorage()
        damaged.files[NAME] = mutated
        with pytest.raises(CorruptError, match=r"damaged|truncated"):
            load(damaged, written)


def test_a_block_read_by_range_is_correct_or_rejected():
    storage, blocks = MemoryStorage(), make_blocks(elements=40)
    written = write(storage, blocks)
    refused = 0
    for mutated in mutations(storage.files[NAME], 1500, seed=2):
        damaged = MemoryStorage()
        damaged.files[NAME] = mutated
        try:
            contents = read_blocks(damaged, NAME, min(written.size_bytes, len(mutated)), [6])
        except CorruptError:
            refused += 1
        else:
            assert same(contents.blocks[0], blocks[2])
            assert contents.applied == make_applied()
    assert refused > 500


def test_errors_of_the_store_reach_the_caller():
    storage = MemoryStorage()
    with pytest.raises(NotFoundError):
        load_shard(storage, NAME, 1000, "x")
    written = write(storage, make_blocks())
    storage.plan.fail_at("read", error=UnavailableError("the store is away"))
    with pytest.raises(UnavailableError):
        read_blocks(storage, NAME, written.size_bytes, [0])
    storage.plan.fail_at("publish:part", 4, UnavailableError("the store is full"))
    storage.files.clear()
    with pytest.raises(UnavailableError):
        write(storage, make_blocks())
    assert storage.files == {}


def test_blocks_that_differ_from_the_header_are_rejected():
    storage, blocks = MemoryStorage(), make_blocks()
    header = ShardHeader(job="j", number=1, index=0, pservers=1, plan_hash="ab", blocks=[0, 6])
    for wrong in (blocks[:2], blocks[:1]):
        with pytest.raises(ValueError, match="header"):
            write_shard(storage, NAME, header, b"", wrong, 2)
    assert storage.files == {}


def test_a_checkpoint_does_not_wait_for_pandas_to_be_imported():
    """``pa.array`` would import pandas, which would block the first checkpoint for seconds."""
    code = (
        "import sys; from tests.formats.test_shard_files import MemoryStorage, make_blocks, write;"
        "write(MemoryStorage(), make_blocks(1)); assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_a_part_is_hashed_before_the_next_one_is_requested() -> None:
    """Otherwise its memory could be reused first, or parts could be hashed in another order."""

    class Later:
        """An executor that works only while its result is awaited."""

        def submit(self, work: Callable[[bytes], None], part: bytes) -> SimpleNamespace:
            return SimpleNamespace(result=lambda: work(part))

    parts = [memoryview(bytes([number]) * size) for number, size in enumerate((_LARGE_BYTES, 10, 2 * _LARGE_BYTES))]
    digest, later = xxhash.xxh3_128(), Later()
    assert list(_hashed(parts, digest, later)) == parts  # type: ignore[arg-type]
    assert digest.hexdigest() == xxhash.xxh3_128(b"".join(parts)).hexdigest()


def test_rows_with_a_flipped_bit_are_rejected():
    """Rows are read by range, so the file's hash is not compared."""
    storage, numbers = MemoryStorage(), np.arange(1, 4, dtype=np.uint32)
    values = np.random.default_rng(0).random((3, 2), np.float32)
    slots = np.zeros((3, 0), np.float32)
    rows = StoredRows(0, 0, "rows:float32", numbers.astype(np.uint64), numbers, numbers, numbers, slots, values)
    spans = [StoredRowSpan(0, 1, 5, 2, 0)]
    header = ShardHeader(job="j", number=1, index=0, pservers=1, plan_hash="ab", blocks=[], rows=spans)
    size_bytes = write_shard(storage, NAME, header, make_applied(0), iter([]), 0, [rows]).size_bytes
    (found,) = read_rows(storage, NAME, size_bytes)[2]
    assert (found.values == values).all()
    intact = storage.files[NAME]
    for array in (values, rows.ids, numbers):
        damaged = bytearray(intact)
        damaged[intact.index(array.tobytes())] ^= 1
        storage.files[NAME] = bytes(damaged)
        with pytest.raises(CorruptError, match="checksum"):
            list(read_rows(storage, NAME, size_bytes)[2])


@pytest.mark.parametrize(
    ("described", "text"),
    [
        ({"blocks": [3, 0]}, "block 3 does not match"),
        ({"blocks": [0]}, "more blocks than its header names"),
        ({"blocks": [0, 3, 6]}, "damaged"),
    ],
)
def test_a_file_whose_header_names_other_blocks_is_rejected(
    monkeypatch: pytest.MonkeyPatch, described: dict[str, list[int]], text: str
) -> None:
    """Its hash is correct, because it was damaged before it was hashed."""
    schema = shard_files._schema

    def wrong(header: ShardHeader, *more: Any) -> Any:
        return schema(msgspec.structs.replace(header, **described), *more)

    storage = MemoryStorage()
    monkeypatch.setattr(shard_files, "_schema", wrong)
    written = write(storage, make_blocks(2))
    monkeypatch.undo()
    with pytest.raises(CorruptError, match=text):
        load(storage, written)


def test_a_block_of_another_size_than_it_names_is_rejected() -> None:
    storage = MemoryStorage()
    (block,) = make_blocks(1)
    for wrong in (replace(block, stop=block.stop + 1), replace(block, slots=(block.values[:5],))):
        written = write(storage, [wrong])
        with pytest.raises(CorruptError, match="does not have the size"):
            load(storage, written)


def test_rows_of_a_span_that_the_header_does_not_name_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, numbers = MemoryStorage(), np.arange(1, 4, dtype=np.uint32)
    slots, values = np.zeros((3, 0), np.float32), np.ones((3, 2), np.float32)
    rows = StoredRows(0, 0, "rows:float32", numbers.astype(np.uint64), numbers, numbers, numbers, slots, values)
    header = ShardHeader(
        job="j", number=1, index=0, pservers=1, plan_hash="ab", blocks=[], rows=[StoredRowSpan(0, 1, 5, 2, 0)]
    )
    schema = shard_files._schema

    def wrong(header: ShardHeader, *more: Any) -> Any:
        return schema(msgspec.structs.replace(header, rows=[StoredRowSpan(7, 1, 5, 2, 0)]), *more)

    monkeypatch.setattr(shard_files, "_schema", wrong)
    written = write_shard(storage, NAME, header, make_applied(0), iter([]), 0, [rows])
    monkeypatch.undo()
    with pytest.raises(CorruptError, match="in no span of its header"):
        load(storage, written)


@pytest.mark.parametrize("window_bytes", [64, 1000])
def test_a_file_that_is_read_in_small_windows_is_hashed_to_its_end(
    monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    storage, blocks = MemoryStorage(), make_blocks()
    written = write(storage, blocks)
    monkeypatch.setattr(shard_files, "_READ_AHEAD_BYTES", window_bytes)
    assert all(same(one, other) for one, other in zip(load(storage, written)[2], blocks, strict=True))
    data = bytearray(storage.read(NAME))
    data[-1] ^= 1
    storage.publish(NAME, [bytes(data)])
    with pytest.raises(CorruptError, match="hash"):
        load(storage, written)


@pytest.mark.parametrize("column", [2, 3, 4, 5])
def test_rows_with_columns_of_different_lengths_are_corrupt(column: int) -> None:
    arrays = [np.zeros(6, np.float32), np.zeros(3, np.float32), np.arange(3, dtype=np.uint64)]
    arrays += [np.zeros(3, np.uint32) for _ in range(3)]
    buffers = [pa.py_buffer(array[: len(array) - (place == column)].tobytes()) for place, array in enumerate(arrays)]
    fixed = (0, 0, 0, 3, 1, 1)
    with pytest.raises(CorruptError):
        decode_rows(fixed, "float32", row_checksum(fixed, "float32", buffers), buffers)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), pa.ArrowMemoryError("malloc failed"), OSError(errno.EMFILE, "Too many open files")],
    ids=repr,
)
def test_what_a_machine_lacks_is_not_damage_of_a_shard(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pserver that calls a file damaged makes all pservers drop the checkpoint."""
    storage = MemoryStorage()
    written = write(storage, make_blocks())

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(shard_files, "_block_of", fail)
    with pytest.raises(ExhaustedError, match=f"/{NAME} cannot be read: this machine"):
        read_blocks(storage, NAME, written.size_bytes, [0])
    with pytest.raises(ExhaustedError, match=f"/{NAME} cannot be read: this machine"):
        load(storage, written)
