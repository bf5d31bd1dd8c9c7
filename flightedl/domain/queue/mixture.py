"""Tasks of a mixture: each task contains records of all sources, in proportion to the sources' weights.

A source is the stream of records in its chunks, in order. Task t consists of records ``R t`` to ``R (t + 1)`` of the
mixture, which are the next records of each stream. After any number of tasks, the number of records from each source
differs from its exact share by only a few.

The records of a task are shuffled as in any other task. Because the result depends only on the arguments, a task and a
batch identify a position in the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

#: When an epoch ends: when the first source is exhausted ("first"), when every record has been used once ("all"), or
#: when every record has been used and shorter sources have been repeated ("repeat").
STOPS = ("first", "all", "repeat")


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of chunks, grouped by task. All arrays except ``firsts`` have the shape (piece count,)."""

    chunks: Numbers
    #: Number of the chunk's records before the piece.
    skipped: Numbers
    #: Number of records in the piece.
    records: Numbers
    #: Index of the first piece of each task, (task count,).
    firsts: Numbers

    @staticmethod
    def concatenated(parts: Sequence[tuple[int, Pieces]]) -> Pieces:
        """Return the tasks of several ranges of chunks, given the first chunk of each. Requires at least one range."""
        before = accumulate((len(pieces.chunks) for _, pieces in parts), initial=0)
        columns = [
            (first + pieces.chunks, pieces.skipped, pieces.records, count + pieces.firsts)
            for (first, pieces), count in zip(parts, before, strict=False)
        ]
        return Pieces(*map(np.concatenate, zip(*columns, strict=True)))


def mixed(
    records: Numbers,
    sources: Numbers,
    weights: Sequence[float],
    is_cut: Sequence[bool],
    records_per_task: int = 0,
    stop: str = "first",
) -> Pieces:
    """Return the tasks of a mixture.

    Args:
        records: Number of records in each chunk, (chunk count,).
        sources: Number of each chunk's source, (chunk count,). Every source has records.
        weights: Weight of each source; greater than 0.
        is_cut: True for each source whose chunks may be split between tasks.
        records_per_task: Records per task; 0 for as many as contain one average chunk of the source with the greatest
            weight.
        stop: One of ``STOPS``.
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    sizes = np.bincount(sources, records, len(shares)).astype(np.int64)
    epochs = sizes / shares
    total = int(epochs.min() if stop == "first" else np.ceil(epochs.max()))
    greatest = int(np.argmax(shares))
    each = records_per_task or max(1, round(records[sources == greatest].mean() / shares[greatest]))
    ends = np.minimum(np.arange(-(-total // each) + 1) * each, total)
    # Round the cumulative shares instead of the individual shares, so that every task has exactly its number of
    # records.
    edges = np.rint(np.outer(np.concatenate([[0.0], np.cumsum(shares[:-1]), [1.0]]), ends)).astype(np.int64)
    given = np.maximum.accumulate(np.diff(edges, axis=0), axis=1)
    if stop == "repeat":
        longest = int(np.argmax(epochs))
        given[longest] = np.minimum(given[longest], sizes[longest])
        given[longest, -1] = sizes[longest]
    else:
        given = np.minimum(given, sizes[:, np.newaxis])
        given[:, -1] = sizes if stop == "all" else given[:, -1]
    pieces = []
    for source, cut in enumerate(is_cut):
        chunks = np.flatnonzero(sources == source)
        task, chunk, skipped, counts = _pieces(records[chunks], given[source], is_cut=cut)
        pieces.append(np.stack([task, np.full(len(task), source), chunks[chunk], skipped, counts]))
    task, _, chunk, skipped, counts = (joined := np.concatenate(pieces, axis=1))[
        :, np.argsort(joined[0] * len(shares) + joined[1], kind="stable")
    ]
    return Pieces(chunk, skipped, counts, np.flatnonzero(np.diff(task, prepend=-1)))


def _pieces(records: Numbers, given: Numbers, *, is_cut: bool) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return four arrays with one entry per piece of a source: task, chunk, records skipped, number of records.

    Args:
        records: Records of the source's chunks.
        given: Records of the source before each task, and in total, (task count + 1,).
        is_cut: See ``mixed``.
    """
    ends = np.cumsum(records)
    size, most = int(ends[-1]), int(given[-1])
    laps = size * np.arange(-(-most // size))
    starts = (laps[:, np.newaxis] + (ends - records)).ravel()
    if is_cut:
        starts = np.union1d(starts, given)
    starts = starts[starts < most]
    within = starts % size
    chunk = np.searchsorted(ends, within, side="right")
    counts = np.diff(starts, append=most) if is_cut else records[chunk]
    task = np.searchsorted(given, starts, side="right") - 1
    return task, chunk, within - (ends - records)[chunk], counts
