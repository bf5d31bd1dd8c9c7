"""Task layout of a declared dataset, which has one source or is a mixture of several sources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from fsspec.utils import glob_translate

from flightedl.domain.queue.mixture import mixed
from flightedl.errors import DataError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import Chunk
from flightedl.formats.indices import Indices
from flightedl.formats.layout import TaskLayout
from flightedl.formats.parquet import Parquet
from flightedl.messages.declarations import DatasetDeclaration

#: Formats whose chunks may be split.
_CUT = (Parquet.name, Indices.name)


def layout_of(
    index: ChunkIndex, declared: DatasetDeclaration, batch_size: int, bounds: Sequence[int] = ()
) -> TaskLayout:
    """Return the tasks of a declared dataset. For ``bounds`` see ``TaskLayout``.

    Raises:
        DataError: a source of a mixture has no records.
    """
    if declared.mixture:
        return MixedLayout(index, declared, batch_size)
    return TaskLayout(
        index,
        batch_size,
        steps_per_batch=declared.steps_per_batch,
        records_per_task=declared.records_per_task,
        bounds=bounds,
    )


class MixedLayout(TaskLayout):
    """Tasks of a mixture of URLs or patterns. If several of these match a file, it belongs to the first one."""

    def __init__(self, index: ChunkIndex, declared: DatasetDeclaration, batch_size: int) -> None:
        super().__init__(index, batch_size, steps_per_batch=declared.steps_per_batch)
        matches = [re.compile(f"{re.escape(_path(url))}|{glob_translate(_path(url))}") for url in declared.urls]
        of_file = [_source(stat.url, matches) for stat in index.stats]
        counts = np.diff([index.first_chunk(number) for number in range(len(of_file) + 1)])
        sources = np.repeat(np.array(of_file, np.int64), counts)
        for number, url in enumerate(declared.urls):
            if not index.records[sources == number].sum():
                raise DataError(f"the source {url} of the mixture has no records, or earlier sources have them all")
        whole = {source for file, source in enumerate(of_file) if index.file_index(file).format not in _CUT}
        is_cut = [source not in whole for source in range(len(matches))]
        weights, stop = declared.mixture, declared.stop
        self._mixture = mixed(index.records, sources, weights, is_cut, declared.records_per_task, stop)
        self._firsts = self._mixture.firsts
        self._records = np.add.reduceat(self._mixture.records, self._firsts)

    @property
    def record_count(self) -> int:
        return int(self._records.sum())

    def chunk_range(self, task: int) -> range:
        self._valid(task)
        end = self._firsts[task + 1] if task + 1 < self.task_count else len(self._mixture.chunks)
        return range(int(self._firsts[task]), int(end))

    def chunks_of(self, task: int) -> list[Chunk]:
        pieces = self._mixture
        found = []
        for piece in self.chunk_range(task):
            chunk = self.index.chunk(int(pieces.chunks[piece]))
            first = chunk.first_record + int(pieces.skipped[piece])
            found.append(replace(chunk, first_record=first, records=int(pieces.records[piece])))
        return found


def _source(url: str, matches: Sequence[re.Pattern[str]]) -> int:
    for number, match in enumerate(matches):
        if match.fullmatch(_path(url)):
            return number
    raise DataError(f"no source of the mixture matches {url}: write URLs as the store lists them")


def _path(url: str) -> str:
    return url.partition("://")[2] or url
