"""TFRecord files that TensorFlow writes, and TensorFlow's reading of those that flightedl writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flightedl.adapters.storage import FsspecFiles, FsspecStorage
from flightedl.formats.convert import Target, convert
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import read_task
from flightedl.formats.registry import named_format

# Warnings of these packages are not ours to fix.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

RECORDS = 500


def rows(count: int) -> list[dict[str, list[Any]]]:
    """Return features of many lengths, with float32 numbers and all sizes of integers."""
    random = np.random.default_rng(0)
    found = []
    for number in range(count):
        bits = int(random.integers(0, 64))
        row: dict[str, list[Any]] = {
            "id": [number],
            "size": [int(random.integers(-(2**bits), 2**bits - 1, endpoint=True))],
            "pixels": random.standard_normal(number % 7).astype(np.float32).tolist(),
            "words": [random.bytes(length) for length in range(number % 4)],
            "rate": [float(np.float32(random.standard_normal()))],
        }
        found.append({name: values for name, values in row.items() if name != "rate" or number % 3})
    return found


def read(pattern: str, **options: Any) -> list[dict[str, Any]]:
    spec = DatasetSpec((pattern,), batch_size=64, text_chunk_bytes=4096, **options)
    index = build_index(FsspecFiles(), spec)
    layout = TaskLayout(index, spec.batch_size)
    tasks = (layout.chunks_of(task) for task in range(layout.task_count))
    batches = (read_task(FsspecFiles(), chunks, spec, None, 0, 0, schema=index.schema) for chunks in tasks)
    return [row for each in batches for batch in each for row in batch.to_pylist()]


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_what_tensorflow_writes_is_read(compression: str, tmp_path: Path) -> None:
    import tensorflow as tf

    kinds = {
        "id": lambda values: tf.train.Feature(int64_list=tf.train.Int64List(value=values)),
        "pixels": lambda values: tf.train.Feature(float_list=tf.train.FloatList(value=values)),
        "words": lambda values: tf.train.Feature(bytes_list=tf.train.BytesList(value=values)),
    }
    kinds |= {"size": kinds["id"], "rate": kinds["pixels"]}
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord"), compression) as writer:
        for row in rows(RECORDS):
            features = {name: kinds[name](values) for name, values in row.items()}
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    expected = [
        {name: (row.get(name) or [None])[0] if name in ("id", "size", "rate") else row[name] for name in sorted(kinds)}
        for row in rows(RECORDS)
    ]
    assert read(str(tmp_path / "*.tfrecord")) == expected


def test_tensorflow_reads_what_is_written(tmp_path: Path) -> None:
    import tensorflow as tf

    singles = {"id": pa.int64(), "size": pa.int64(), "rate": pa.float32()}
    lists = {"pixels": pa.list_(pa.float32()), "words": pa.list_(pa.binary())}
    columns = {name: [(row.get(name) or [None])[0] for row in rows(RECORDS)] for name in singles}
    columns |= {name: [row[name] for row in rows(RECORDS)] for name in lists}
    table = pa.table({name: pa.array(columns[name], kind) for name, kind in {**singles, **lists}.items()})
    (tmp_path / "a.parquet").write_bytes(b"".join(named_format("parquet").write(table.to_batches(), table.schema)))
    spec = DatasetSpec((str(tmp_path / "a.parquet"),))
    target = Target("b", "tfrecord", 2)
    done = convert(FsspecFiles(), build_index(FsspecFiles(), spec), spec, FsspecStorage(str(tmp_path)), target)
    features = {name: tf.io.FixedLenFeature([], tf.int64) for name in ("id", "size")}
    features["rate"] = tf.io.FixedLenFeature([], tf.float32, default_value=-1000.0)
    features["pixels"] = tf.io.VarLenFeature(tf.float32)
    features["words"] = tf.io.VarLenFeature(tf.string)
    found = []
    for data in tf.data.TFRecordDataset([str(tmp_path / name) for name in done.names]):
        parsed = tf.io.parse_single_example(data, features)
        row = {name: parsed[name].numpy().item() for name in singles}
        row["rate"] = None if row["rate"] == -1000.0 else row["rate"]
        found.append({**row, **{name: parsed[name].values.numpy().tolist() for name in lists}})
    assert found == table.to_pylist()
