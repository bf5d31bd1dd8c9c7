"""Numbered files that appear complete or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.client.data.shard_writer import ShardWriter
from flightedl.errors import DataError, LossyError, UsageError

#: Writes records in files of 1,000 for ever, from the first one that no file has.
FOR_EVER = """
import sys
from itertools import count
from flightedl.client.data.shard_writer import ShardWriter

with ShardWriter(sys.argv[1], rows_per_shard=1000) as writer:
    for first in count(writer.shards * 1000, 300):
        writer.write({"n": range(first, first + 300)})
        print(first, flush=True)
"""
#: Writes records to a store that is full for a while.
FULL = """
import resource, sys
from flightedl.client.data.shard_writer import ShardWriter
from flightedl.errors import FlightedlError

writer = ShardWriter(sys.argv[1], rows_per_shard=100_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        writer.write({"n": range(60_000)})
    except FlightedlError as error:
        print(type(error).__name__, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.close()
"""


def numbers(folder: Path, pattern: str = "*.parquet") -> list[list[int]]:
    return [pq.read_table(path)["n"].to_pylist() for path in sorted(folder.glob(pattern))]


def test_files_have_equally_many_records_in_order(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "new" / "t-{}.parquet", rows_per_shard=5) as writer:
        writer.write(pa.record_batch({"n": [0, 1]}))
        writer.write(pa.table({"n": list(range(2, 14))}))
        assert writer.shards == 2
        writer.write({"n": [14, 15]})
        writer.write({"n": pa.array([], pa.int64())})
    assert numbers(tmp_path / "new") == [[*range(5)], [*range(5, 10)], [*range(10, 15)], [15]]
    with ShardWriter(tmp_path / "new" / "t-{}.parquet", rows_per_shard=5) as writer:
        writer.write({"n": [16]})
    assert [path.name for path in sorted((tmp_path / "new").iterdir())] == [f"t-0000{n}.parquet" for n in range(5)]


@pytest.mark.parametrize("kill_after", [1, 5, 11])
def test_a_killed_writer_leaves_whole_files(tmp_path: Path, kill_after: int) -> None:
    name = str(tmp_path / "t-{}.parquet")
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", FOR_EVER, name], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        with writer.stdout:
            for _ in range(kill_after):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            writer.wait(30)
    found = numbers(tmp_path)
    assert [number for shard in found for number in shard] == list(range(1000 * len(found)))


def test_a_full_store_loses_no_record(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "t-{}.csv")], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(("ExhaustedError", "UnavailableError"))
    assert [len(path.read_text().splitlines()) for path in sorted(tmp_path.iterdir())] == [100_001, 20_001]


def test_a_block_that_raises_writes_no_more(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ShardWriter(tmp_path / "{}.parquet", rows_per_shard=2) as writer:  # noqa: PT012
        writer.write({"n": [1, 2, 3]})
        raise RuntimeError
    assert numbers(tmp_path) == [[1, 2]]


@pytest.mark.parametrize(
    ("url", "batch", "text"),
    [
        ("t.parquet", {"n": [1]}, "must be a name such as train-{}.parquet"),
        ("{}-{}.parquet", {"n": [1]}, "must be a name such as"),
        ("{}/t.parquet", {"n": [1]}, "must be a name such as"),
        ("t-{}.csv.gz", {"n": [1]}, "not compressed"),
        ("t-{}", {"n": [1]}, "implies no format"),
        ("t-{}.parquet", {"n": [1], "m": [1, 2]}, "has no columns of equal length"),
        ("t-{}.parquet", 5, "a batch is 5"),
        ("t-{}.slots", {"n": [1]}, "slots can only be read"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, url: str, batch: Any, text: str) -> None:
    with pytest.raises((UsageError, DataError)) as caught:
        ShardWriter(tmp_path / url, rows_per_shard=1).write(batch)
    assert text in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_batches_need_the_same_columns_and_values_must_not_change(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "{}.csv", rows_per_shard=10)
    writer.write({"n": ["01"]})
    with pytest.raises(UsageError, match=r"columns 'n.*int64', and earlier ones have 'n.*string'"):
        writer.write({"n": [1]})
    with pytest.raises(LossyError):
        writer.write({"n": ["1"] * 8 + [None]})
