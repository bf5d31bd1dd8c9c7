"""Tasks, and data of a group, of a declared dataset, which has one source or is a mixture of several sources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flightedl.domain.data_urls import matcher
from flightedl.domain.groups.lanes import GroupData
from flightedl.domain.queue.drawing import VERSION, drawn
from flightedl.domain.queue.mixture import Pieces, mixed
from flightedl.domain.queue.permutation import key_of
from flightedl.errors import DataError, UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.indices import Indices, is_of_indices
from flightedl.formats.layout import TaskLayout
from flightedl.formats.parquet import Parquet
from flightedl.messages.declarations import DatasetDeclaration, Drawing

#: Formats whose chunks may be split.
_CUT = (Parquet.name, Indices.name)


def drawing_of(declared: DatasetDeclaration) -> Drawing | None:
    """Return how to draw the tasks of a new dataset; None if they are not drawn."""
    if not declared.shuffle_bytes or not is_drawable(declared):
        return None
    return Drawing(seed=declared.seed, size_bytes=declared.shuffle_bytes, version=VERSION)


def is_drawable(declared: DatasetDeclaration) -> bool:
    """True if the data is to be shuffled, and its tasks would not be mixed otherwise."""
    return declared.shuffle and not declared.mixture and not all(map(is_of_indices, declared.urls))


def layout_of(
    index: ChunkIndex,
    declared: DatasetDeclaration,
    batch_size: int,
    bounds: Sequence[int] = (),
    drawing: Drawing | None = None,
) -> TaskLayout:
    """Return the tasks of a declared dataset. For ``bounds`` see ``TaskLayout``.

    Raises:
        DataError: a source of a mixture has no records.
        UsageError: a newer version has begun the job.
    """
    steps, records_per_task = declared.steps_per_batch, declared.records_per_task
    if declared.mixture:
        return TaskLayout(index, batch_size, steps_per_batch=steps, pieces=_mixed(index, declared))
    if drawing is None:
        return TaskLayout(index, batch_size, steps_per_batch=steps, records_per_task=records_per_task, bounds=bounds)
    if drawing.version > VERSION:
        raise UsageError("a newer version of flightedl has begun this job: continue with that version")
    records, decoded_bytes, size_bytes, parts = index.records, index.decoded_bytes, drawing.size_bytes, []
    for start, end in pairwise([0, *bounds, len(index)]):
        if start < end:
            data, seed = (records[start:end], decoded_bytes[start:end]), key_of(drawing.seed, start)
            parts.append((start, drawn(*data, batch_size, seed, size_bytes, records_per_task)))
    return TaskLayout(index, batch_size, steps_per_batch=steps, pieces=Pieces.concatenated(parts))


def group_data(index: ChunkIndex, declared: DatasetDeclaration, seed: int | None) -> GroupData:
    """Return the properties of a declared dataset that determine the order in which a group reads it.

    Raises:
        DataError: a source of a mixture has no records.
    """
    if declared.mixture:
        weights, stop = tuple(declared.mixture), declared.stop
        return GroupData(index.records, index.decoded_bytes, _sources(index, declared)[1], weights, stop, seed)
    return GroupData(index.records, index.decoded_bytes, np.zeros(len(index), np.int64), seed=seed)


def _sources(index: ChunkIndex, declared: DatasetDeclaration) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Return the sources of a mixture's files and chunks, (file_count,) and (chunk_count,)."""
    matches = [re.compile(f"{re.escape(_path(url))}|{matcher(_path(url)).pattern}") for url in declared.urls]
    of_file = [_source(stat.url, matches) for stat in index.stats]
    counts = np.diff([index.first_chunk(number) for number in range(len(of_file) + 1)])
    sources = np.repeat(np.array(of_file, np.int64), counts)
    for number, url in enumerate(declared.urls):
        if not index.records[sources == number].sum():
            raise DataError(f"the source {url} of the mixture has no records, or earlier sources have them all")
    return of_file, sources


def _mixed(index: ChunkIndex, declared: DatasetDeclaration) -> Pieces:
    """Return the tasks of a mixture. If several URLs or patterns match a file, it belongs to the first one."""
    of_file, sources = _sources(index, declared)
    whole = {source for file, source in enumerate(of_file) if index.files[file].format not in _CUT}
    is_cut = [source not in whole for source in range(len(declared.urls))]
    return mixed(index.records, sources, declared.mixture, is_cut, declared.records_per_task, declared.stop)


def _source(url: str, matches: Sequence[re.Pattern[str]]) -> int:
    for number, match in enumerate(matches):
        if match.fullmatch(_path(url)):
            return number
    raise DataError(f"no source of the mixture matches {url}: write URLs as the store lists them")


def _path(url: str) -> str:
    return url.partition("://")[2] or url
