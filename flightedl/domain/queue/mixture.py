"""Tasks of a mixture: every task has records of all sources in proportion to their weights.

A source is a stream: the records of its chunks, one after the other. Task t of records ``R t`` to ``R (t + 1)`` of the
mixture takes the next records of each stream, so that after any number of tasks each source has given its share to
within a few records. Within a task records are shuffled as in every task. The result depends on nothing but the
arguments, so a position in a mixture is a task and a batch, as it is everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

#: When an epoch ends: with the first source that is used up, or when every record was given once, or when every
#: record was given, the shorter sources repeatedly.
STOPS = ("first", "all", "repeat")


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Pieces of chunks, those of a task one after the other: (piece count,) each but for ``firsts``."""

    chunks: Numbers
    #: Records of the chunk before the piece, and within it.
    skipped: Numbers
    records: Numbers
    #: Number of the first piece of each task, (task count,).
    firsts: Numbers


def mixed(
    records: Numbers,
    sources: Numbers,
    weights: Sequence[float],
    is_cut: Sequence[bool],
    records_per_task: int = 0,
    stop: str = "first",
) -> Mixture:
    """Return the tasks of a mixture.

    Args:
        records: Records of each chunk, (chunk count,).
        sources: Number of each chunk's source, (chunk count,). Every source has records.
        weights: Weight of each source, above 0.
        is_cut: True for a source whose chunks may be cut; chunks of another one belong to one task as a whole.
        records_per_task: 0: as many as contain one chunk of the source that has the greatest weight.
        stop: One of ``STOPS``.
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    sizes = np.bincount(sources, records, len(shares)).astype(np.int64)
    epochs = sizes / shares
    total = int(epochs.min() if stop == "first" else np.ceil(epochs.max()))
    greatest = int(np.argmax(shares))
    each = records_per_task or max(1, round(records[sources == greatest].mean() / shares[greatest]))
    ends = np.minimum(np.arange(-(-total // each) + 1) * each, total)
    # Rounded sums of shares, so that a task has as many records as it should.
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
    return Mixture(chunk, skipped, counts, np.flatnonzero(np.diff(task, prepend=-1)))


def _pieces(records: Numbers, given: Numbers, *, is_cut: bool) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return task, chunk, skipped records and records of each piece of one source.

    Args:
        records: Records of its chunks.
        given: Records that tasks before this one have, for each task and for one past the last, (task count + 1,).
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
