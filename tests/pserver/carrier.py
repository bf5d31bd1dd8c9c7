"""Moves blocks between two shards of this process with the steps of two movers, but without etcd and sockets."""

from __future__ import annotations

from collections.abc import Iterable

from flightedl.pserver.moving.arrival import Arrival
from flightedl.pserver.moving.departure import Departure
from flightedl.pserver.moving.parcels import Digest, Parcel, decode, encode
from flightedl.pserver.shard import Shard


def carry(source: Shard, target: Shard, numbers: range, *, discards: bool = True) -> bool:
    """Move adjacent blocks, or adjacent buckets. Return False if a round or a cut is open, and nothing has moved.

    With ``discards``, the source also removes the rows from its memory, which a pserver does later.
    """
    departure = Departure(source, numbers)
    try:
        arrival = Arrival(target, numbers, departure.size_bytes)
        stage(departure.copy(), arrival)
        if not source.freeze(numbers):
            source.thaw(numbers)
            return False
        stage(departure.rest(), arrival)
    finally:
        departure.end()
    hand_over(source, numbers, arrival, discards=discards)
    return True


def stage(content: Iterable[Parcel], arrival: Arrival) -> None:
    digest = Digest()
    for parcel in content:
        batch, metadata = encode(parcel)
        digest.update(batch.columns, metadata)
        arrival.digest.update(batch.columns, metadata)
        arrival.add(decode(batch.columns, metadata))


def hand_over(source: Shard, numbers: range, arrival: Arrival, *, discards: bool = True) -> None:
    """Make the target the owner of a frozen unit that it has staged completely."""
    arrival.prepare()
    source.drop(numbers)
    source.thaw(numbers)
    arrival.adopt()
    while discards and source.rows.has_leftovers:
        source.rows.discard_some()
