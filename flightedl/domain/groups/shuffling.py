"""Choice of an epoch's order (see ``lanes``): the number of lanes, and the size of their windows.

Rules:

* K is the greatest divisor of the global batch size B that is at most 64, the number of chunks, and B / 2. While K of
  the largest chunks, decoded, exceed ``size_bytes``, K is the next smaller divisor that is at least 8.
* K windows have at most ``block`` records, and at most as many as fit into ``size_bytes``.
* A rank reads K / W lanes. For each of them, it holds at most twice a window and a chunk.

Neither the number of ranks nor the machine matters, so the order is the same for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from flightedl.domain.groups.lanes import GroupData
from flightedl.domain.groups.plan import Order
from flightedl.domain.queue.drawing import SIZE_BYTES, megabytes
from flightedl.errors import UsageError

#: Most lanes by default, and lanes that data is divided into even if their chunks exceed ``size_bytes``.
_MOST_LANES, _FEW_LANES = 64, 8
#: A rank reports the lanes of its round to the master, in one message.
_LANES_LIMIT = 1024


class Shuffling(msgspec.Struct, frozen=True, array_like=True):
    """Settings of the order as given by the user. A position in the data contains them."""

    #: Number of lanes; 0 to choose it.
    lanes: int = 0
    block: int = 1 << 18
    size_bytes: int = SIZE_BYTES

    def __str__(self) -> str:
        return f"lanes={self.lanes or None}, shuffle_block={self.block} and shuffle_bytes={self.size_bytes}"


def order_of(data: GroupData, batch_size: int, given: Shuffling) -> Order:
    """Return the order of epochs with global batches of ``batch_size`` records.

    Raises:
        UsageError: the given number of lanes does not fit the data or the batch size.
    """
    lanes = _chosen(data, batch_size, given) if given.lanes == 0 else given.lanes
    if batch_size % lanes or lanes > min(_most(data), _LANES_LIMIT):
        raise UsageError(
            f"lanes is {lanes}, but must divide the global batch of {batch_size} records and be at most "
            f"{min(_most(data), _LANES_LIMIT)}, the number of chunks with records (or {_LANES_LIMIT}): give a smaller "
            "divisor, or leave it out"
        )
    if data.seed is None:
        return Order(lanes, 0)
    return Order(lanes, max(1, min(given.block, int(given.size_bytes / _mean_bytes(data))) // lanes))


def _most(data: GroupData) -> int:
    return min(data.chunk_count, int(data.sizes.min()))


def _mean_bytes(data: GroupData) -> float:
    return max(int(data.decoded_bytes.sum()), 1) / max(int(data.records.sum()), 1)


def _chosen(data: GroupData, batch_size: int, given: Shuffling) -> int:
    if data.seed is None:
        return 1
    most = max(min(_MOST_LANES, _most(data), batch_size // 2), 1)
    divisors = [number for number in range(most, 0, -1) if batch_size % number == 0]
    largest = int(data.decoded_bytes.max())
    few = [number for number in divisors if number >= _FEW_LANES]
    return next((n for n in few if n * largest <= given.size_bytes), few[-1] if few else divisors[0])


@dataclass(frozen=True, slots=True)
class Advice:
    """Consequences of an order, for users."""

    #: About how many chunks the records of a global batch come from.
    mixed_chunks: int
    #: Most bytes of decoded records that a rank holds.
    held_bytes: int
    #: What a batch mixes and what a rank does, and what is wrong with the files or the batch size.
    text: str
    warnings: tuple[str, ...]


def advice_of(data: GroupData, order: Order, batch_size: int, world_size: int, given: Shuffling) -> Advice:
    """Return the consequences of an order for ``world_size`` ranks."""
    chunks, records, lanes = data.chunk_count, int(data.records.sum()), order.lanes
    window = min(order.window, -(-records // lanes))
    mixed = min(chunks, round(lanes * max(1, window * chunks / records)))
    largest = int(data.decoded_bytes.max())
    own = max(lanes // world_size, 1) if not lanes % world_size or not world_size % lanes else lanes // world_size + 2
    own = min(own, lanes)
    held = own * 2 * (int(window * _mean_bytes(data)) + largest)
    text = (
        f"a global batch of {batch_size} records mixes records of about {mixed:,} of {chunks:,} chunks (lanes={lanes}, "
        f"window={order.window:,} records); a rank reads {own} of {lanes} lanes and holds at most {megabytes(held)}"
    )
    warnings = []
    if data.seed is not None and lanes < _FEW_LANES and lanes * window < records:
        if chunks < _FEW_LANES:
            advice = "rewrite the files with smaller chunks (`flightedl dataset split`)"
        else:
            advice = f"choose a global batch that has a divisor from {_FEW_LANES} to {_MOST_LANES}"
        warnings.append(f"shuffle=True mixes only {lanes * window:,} of {records:,} records at a time: {advice}")
    if lanes * largest > given.size_bytes:
        warnings.append(
            f"a chunk has up to {megabytes(largest)} decoded, so a rank may hold {megabytes(held)}: rewrite the "
            "files with smaller chunks (`flightedl dataset split`)"
        )
    if lanes == 1 < world_size:
        advice = "`flightedl dataset split` makes chunks" if chunks == 1 else "lanes= divides them, too"
        warnings.append(f"there is only one lane, so each of the {world_size} ranks decodes all records: {advice}")
    return Advice(mixed, held, text, tuple(warnings))
