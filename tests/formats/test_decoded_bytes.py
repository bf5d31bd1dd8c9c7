"""Estimates of the memory that a chunk's records need, from metadata alone."""

from __future__ import annotations

import gzip
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.stored_index import decode_index, encode_index

RECORDS = 2000
NUMBERS = pa.table({"a": np.arange(RECORDS), "b": np.zeros(RECORDS, np.float32)})
WORDS = NUMBERS.append_column("word", pa.array([f"word-{number % 7}" for number in range(RECORDS)]))
VECTORS = pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(64 * RECORDS, np.float32)), 64)})
BYTES = pa.table({"image": [np.random.default_rng(n).bytes(500) for n in range(RECORDS)]})


@pytest.mark.parametrize("table", [NUMBERS, WORDS, VECTORS, BYTES], ids=["numbers", "words", "vectors", "bytes"])
@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_estimates_are_near_the_memory_of_the_records(world: Any, name: str, table: pa.Table) -> None:
    world.write(f"a.{name}", table, name, 500)
    index = build_index(world.files, DatasetSpec((f"a.{name}",)))
    assert len(index) == 4
    assert 0.8 < index.decoded_bytes.sum() / table.nbytes < 1.6


@pytest.mark.parametrize("name", ["csv", "csv.gz", "jsonl"])
def test_estimates_for_text_do_not_depend_on_compression(world: Any, name: str) -> None:
    url = world.write(f"a.{name.removesuffix('.gz')}", WORDS, name.removesuffix(".gz"))
    if name.endswith(".gz"):
        url = world.put(f"a.{name}", gzip.compress(world.files.contents[url]))
    index = build_index(world.files, DatasetSpec((url,)))
    assert 0.5 < index.decoded_bytes.sum() / WORDS.nbytes < 2.5


def test_estimates_are_stored_but_are_not_part_of_the_content(world: Any) -> None:
    world.write("a.parquet", WORDS, "parquet", 500)
    index = build_index(world.files, DatasetSpec(("a.parquet",)))
    stored = encode_index(index)
    assert decode_index(stored).decoded_bytes.tolist() == index.decoded_bytes.tolist()
    before = index.content_hash()
    index._columns.plain_bytes[:] += 1
    assert index.content_hash() == before
    assert encode_index(index) != stored
