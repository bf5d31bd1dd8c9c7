"""Locations of a batch's records: files, chunks and record numbers.

In stored order, consecutive batches contain consecutive records. In shuffled order, the records of a batch are
scattered over the task. The order depends only on seed, epoch and task, so this module computes it as trainers do.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flightedl.domain.groups.lanes import EpochOrder
from flightedl.domain.groups.plan import Piece
from flightedl.domain.queue.batching import record_order
from flightedl.domain.topics import is_topic, topic_and_ranges
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import Chunk
from flightedl.formats.indices import indices_of, is_of_indices
from flightedl.messages.status import RecordRange

_SHOWN = 8


@lru_cache(maxsize=256)
def record_ranges(
    chunks: tuple[Chunk, ...], first: int, end: int, seed: int | None, epoch: int, task: int
) -> tuple[RecordRange, ...]:
    """Return the records at positions ``first`` to ``end`` (exclusive) of a task, as ranges of its files.

    ``seed`` is None if the task is read in stored order.
    """
    total = sum(chunk.records for chunk in chunks)
    if seed is None:
        return tuple(_stretches(chunks, np.arange(first, min(end, total))))
    found = _stretches(chunks, np.sort(record_order(total, seed, epoch, task)[first:end]))
    return tuple(sorted(found, key=lambda each: (each.url, each.first_record)))


def ranges_of(index: ChunkIndex, order: EpochOrder, pieces: Iterable[Piece]) -> list[RecordRange]:
    """Return the records of a group's pieces as ranges of its files."""
    by_chunk: dict[int, list[npt.NDArray[np.int64]]] = {}
    for piece in pieces:
        for chunk, numbers in order.chunk_records(piece):
            by_chunk.setdefault(chunk, []).append(numbers)
    found = ((index.chunk(chunk), np.sort(np.concatenate(by_chunk[chunk]))) for chunk in sorted(by_chunk))
    return [each for chunk, numbers in found for each in _stretches([chunk], numbers)]


def _stretches(chunks: Sequence[Chunk], numbers: npt.NDArray[np.int64]) -> Iterator[RecordRange]:
    start = 0
    for chunk in chunks:
        inside = numbers[(numbers >= start) & (numbers < start + chunk.records)] - start + chunk.first_record
        if is_of_indices(chunk.url):
            inside = np.sort(indices_of(chunk.url, inside))
        runs = np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1) if len(inside) else ()
        for run in runs:
            url = topic_and_ranges(chunk.url)[0] if is_topic(chunk.url) else chunk.url
            yield RecordRange(url=url, chunk=chunk.number, first_record=int(run[0]), records=len(run))
        start += chunk.records


def described(ranges: Sequence[RecordRange]) -> str:
    """Return the ranges as readable text, such as ``a.parquet, records 20-29 and 35``."""
    by_file: dict[str, list[str]] = {}
    joined = _joined(ranges)
    for url, first, end in joined[:_SHOWN]:
        by_file.setdefault(url, []).append(f"{first}" if end == first + 1 else f"{first}-{end - 1}")
    files = "; ".join(f"{url} {', '.join(numbers)}" for url, numbers in by_file.items())
    more = sum(end - first for _, first, end in joined[_SHOWN:])
    return f"{files} and {more} more" if more else files


def _joined(ranges: Sequence[RecordRange]) -> list[tuple[str, int, int]]:
    """Return (file and unit, first record, end) for each range. Adjacent ranges are joined."""
    found: list[tuple[str, int, int]] = []
    for each in ranges:
        end, place = each.first_record + each.records, f"{each.url}, records"
        if is_of_indices(each.url):
            place = "indices"
        elif is_topic(each.url):
            place = f"partition {each.chunk} of {each.url}, offsets"
        if found and found[-1][0] == place and found[-1][2] == each.first_record:
            found[-1] = (place, found[-1][1], end)
        else:
            found.append((place, each.first_record, end))
    return found
