"""``flightedl bench data``: reading data in a job, compared with common libraries that read files.

Each side is a process that reads the same file repeatedly, and the sides take turns. A trainer's time includes
everything that a job does for a batch: assigning tasks, reading ahead, and reporting. ``overlap`` is the duration of a
pass that sleeps after each batch, divided by the duration of a pass that only reads or only sleeps, whichever is
longer. The optimum is 1.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

import flightedl as fe
from flightedl.config import TrainerSettings, child_environment, settings

from .sides import Side, begin, measuring, print_json, print_table, ratio, say, take_turns
from .workers import next_order, ready, report

_RECORDS, _BATCH, _PIECE = 200_000, 1000, 25_000
_SAMPLES, _SAMPLE_BATCH, _SAMPLE_BYTES = 1920, 64, 10_000
#: Memory for reading ahead. It holds less than two passes over a file.
_AHEAD_MB = 16
_STEP_S = 0.004
_PYTHON_S = 0.002
#: Number of batches in a pass with a transform in Python.
_TRANSFORMED = 100
#: Kinds of passes.
_WITH_STEP, _ALONE = 1, 2
_NAMES = ("tar", "parquet", "arrow", "csv")


@dataclass(frozen=True, slots=True)
class OfFormat:
    """Results for one format: each side's records per second, and ratios between the sides."""

    format: str
    records_per_s: dict[str, float]
    #: Records per second, divided by pyarrow's rate (for tar archives: the rate of Python's tarfile).
    by_pyarrow: float
    overlap: float


@dataclass(frozen=True, slots=True)
class Found:
    """All figures."""

    formats: tuple[OfFormat, ...]
    #: Batches per second with a 2 ms transform in two readers, divided by the rate with one reader.
    two_readers: float
    cores: int


def write(directory: Path) -> dict[str, Path]:
    """Write the same records in each format, and samples of 10 kB to a tar archive. Return the files."""
    random = np.random.default_rng(0)
    table = pa.table(
        {
            **{f"x{number}": random.standard_normal(_RECORDS) for number in range(8)},
            "key": random.integers(0, 1 << 40, _RECORDS),
            "text": [f"record {number}" for number in range(_RECORDS)],
        }
    )
    paths = {name: directory / f"data.{name}" for name in _NAMES}
    pq.write_table(table, paths["parquet"], row_group_size=_PIECE)
    with pa.ipc.new_file(str(paths["arrow"]), table.schema) as arrow:
        arrow.write_table(table, max_chunksize=_PIECE)
    pa_csv.write_csv(table, paths["csv"])
    with tarfile.open(paths["tar"], "w") as archive:
        for number in range(_SAMPLES):
            for ending, content in (("jpg", random.bytes(_SAMPLE_BYTES)), ("cls", b"7")):
                info = tarfile.TarInfo(f"{number:06d}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return paths


def batch_size(name: str) -> int:
    """Return the number of records in a batch of this format."""
    return _SAMPLE_BATCH if name == "tar" else _BATCH


def use(batch: pa.RecordBatch) -> None:
    """Read every value, so that libraries that map files or decode lazily have to load the data."""
    for column in batch.columns:
        if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
            pc.sum(column)
        else:
            np.frombuffer(column.buffers()[2], np.uint8)[:: 1 << 6][:_BATCH].sum()


def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Run Python code for 2 ms."""
    end = time.thread_time() + _PYTHON_S
    while time.thread_time() < end:
        pass
    return batch


def _passes(batches: Iterator[Any], count: int, take: Callable[[Any], object]) -> None:
    """Run and time the requested passes of ``count`` batches. A pass reads, sleeps, or does both."""
    ready()
    while (order := next_order())[0]:
        passes, choice = order
        pause_s = _STEP_S if choice else 0.0
        seconds = []
        for _ in range(passes):
            # Batches that were read ahead during another side's turn are not counted.
            for _ in range(2 * count if choice != _ALONE else 0):
                take(next(batches))
            begun = time.perf_counter()
            for _ in range(count):
                if choice != _ALONE:
                    take(next(batches))
                if pause_s:
                    time.sleep(pause_s)
            seconds.append(time.perf_counter() - begun)
        report(seconds, 0.0)


def run_job(path: str, size: int, count: int, readers: int) -> None:
    """Read a file as the only trainer of a job. Apply a slow transform if ``readers`` is given."""
    more: dict[str, Any] = {"transform": slow, "readers": readers} if readers else {}
    with fe.connect() as job:
        data = job.dataset(path, batch_size=size, epochs=None, read_ahead_mb=_AHEAD_MB, **more)
        _passes(iter(data), count, use)


def endless(name: str, path: str, start: int = 0, every: int = 1) -> Iterator[pa.RecordBatch]:
    """Yield batches read with the format's own library, from the pieces ``start``, ``start + every``, and so on."""
    size = batch_size(name)
    while True:
        if name == "parquet":
            file = pq.ParquetFile(path)
            yield from file.iter_batches(size, row_groups=range(start, file.num_row_groups, every))
        elif name == "arrow":
            with pa.memory_map(path) as mapped, pa.ipc.open_file(mapped) as reader:
                for number in range(start, reader.num_record_batches, every):
                    piece = reader.get_batch(number)
                    yield from (piece.slice(first, size) for first in range(0, piece.num_rows, size))
        elif name == "csv":
            batches = pa_csv.read_csv(path).to_batches(max_chunksize=size)
            yield from batches[start::every]
        else:
            yield from _samples(path, size, start, every)


def _samples(path: str, size: int, start: int, every: int) -> Iterator[pa.RecordBatch]:
    rows: list[bytes] = []
    with tarfile.open(path) as archive:
        for number, member in enumerate(archive):
            if member.name.endswith(".jpg") and number // 2 % every == start:
                rows.append(archive.extractfile(member).read())  # type: ignore[union-attr]
            if len(rows) == size:
                yield pa.record_batch({"jpg": rows})
                rows = []


def run_library(name: str, path: str, count: int) -> None:
    """Read a file with the format's own library."""
    _passes(endless(name, path), count, use)


def run_loader(name: str, path: str, count: int, workers: int) -> None:
    """Read a file with PyTorch's DataLoader, whose workers read different pieces and send tensors."""
    import torch
    from torch.utils import data

    class Stream(data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            info = data.get_worker_info()
            share = (0, 1) if info is None else (info.id, info.num_workers)
            for batch in endless(name, path, *share):
                columns = [column for column in batch.columns if not pa.types.is_string(column.type)]
                if name == "tar":
                    yield [torch.frombuffer(bytearray(row), dtype=torch.uint8) for row in columns[0].to_pylist()]
                else:
                    yield [torch.from_numpy(column.to_numpy(zero_copy_only=False).copy()) for column in columns]

    loader = data.DataLoader(Stream(), batch_size=None, num_workers=workers)
    _passes(iter(loader), count, lambda tensors: [tensor.sum() for tensor in tensors])


def run_webdataset(path: str, count: int) -> None:
    """Read an archive with webdataset."""
    import webdataset  # type: ignore[import-not-found]

    found = webdataset.WebDataset(path, shardshuffle=False, empty_check=False).repeat().batched(_SAMPLE_BATCH)
    _passes(iter(found), count, lambda batch: [sample[:: 1 << 6] for sample in batch])


class Bench:
    """Jobs with one trainer each, which share an etcd."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._etcd = ""
        self._count = 0

    def side(self, path: Path, size: int, count: int, readers: int = 0) -> list[Any]:
        self._count += 1
        more = {"etcd": self._etcd} if self._etcd else {}
        cluster = self._stack.enter_context(fe.local(pservers=0, job=f"bench-{self._count}", **more))
        self._etcd = cluster.etcd_address
        environment = child_environment(settings(TrainerSettings, etcd=self._etcd, job=cluster.job))
        return begin(self._stack, run_job, str(path), size, count, readers, environment=environment)


def measure_format(name: str, path: Path, *, turns: int) -> OfFormat:
    """Measure all sides of a format in turn."""
    records = _SAMPLES if name == "tar" else _RECORDS
    count = records // batch_size(name)
    with contextlib.ExitStack() as stack:
        ours = Bench(stack).side(path, batch_size(name), count)
        sides = {
            "flightedl": Side(ours, [], 0),
            "with a step": Side(ours, [], 0, choice=_WITH_STEP),
            "steps alone": Side(ours, [], 0, choice=_ALONE),
            "pyarrow": Side(begin(stack, run_library, name, str(path), count), [], 0),
        }
        if find_spec("torch") is not None:
            for workers in (0, 2):
                loader = begin(stack, run_loader, name, str(path), count, workers)
                sides[f"DataLoader, {workers} workers"] = Side(loader, [], 0)
        if name == "tar" and find_spec("webdataset") is not None:
            sides["webdataset"] = Side(begin(stack, run_webdataset, str(path), count), [], 0)
        times = dict(zip(sides, take_turns(list(sides.values()), turns, [1] * len(sides)), strict=True))
    read, step, alone = times.pop("flightedl"), times.pop("with a step"), times.pop("steps alone")
    per_s = {side: records / float(np.median(found)) for side, found in {"flightedl": read, **times}.items()}
    return OfFormat(
        name, per_s, ratio(times["pyarrow"], read), ratio(step, [max(pair) for pair in zip(read, alone, strict=True)])
    )


def measure_readers(path: Path, *, turns: int) -> float:
    """Return the rate with two readers, divided by the rate with one."""
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        sides = [Side(bench.side(path, _BATCH, _TRANSFORMED, readers), [], 0) for readers in (1, 2)]
        one, two = take_turns(sides, turns, [1, 1])
    return ratio(one, two)


def print_found(found: Found) -> None:
    """Print a table, and messages about the results."""
    sides = list(dict.fromkeys(side for each in found.formats for side in each.records_per_s))
    rows = [
        (
            each.format,
            *(f"{each.records_per_s[side]:,.0f}" if side in each.records_per_s else "" for side in sides),
            f"{each.by_pyarrow:.2f} x",
            f"{each.overlap:.2f}",
        )
        for each in found.formats
    ]
    title = f"records a second of one process, {found.cores} cores (pyarrow of tar: Python's tarfile)"
    print_table(title, ("format", *sides, "by pyarrow", "overlap"), rows)
    click.echo("by pyarrow should be at least 0.8 (arrow) and 0.9 (csv), overlap at most 1.15")
    click.echo(f"two readers of a transform in Python: {found.two_readers:.2f} x one (should be at least 1.7)")


@click.command()
@click.option("--format", "names", type=click.Choice(_NAMES), multiple=True, help="Formats [all]")
@measuring(turns=5)
def data(*, names: tuple[str, ...], turns: int, wants_json: bool) -> None:
    """Compare reading data in a job with pyarrow and, if installed, PyTorch's DataLoader and webdataset."""
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        paths = write(Path(directory))
        formats = []
        for name in names or _NAMES:
            say(name)
            formats.append(measure_format(name, paths[name], turns=turns))
        say("a transform in readers")
        found = Found(tuple(formats), measure_readers(paths["parquet"], turns=turns), os.cpu_count() or 1)
    if wants_json:
        print_json(found)
    else:
        print_found(found)
