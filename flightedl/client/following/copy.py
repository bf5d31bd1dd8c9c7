"""The arrays and rows of a follower's copy, to which bases and increments are applied.

A message is received completely before any part of it is applied, so the copy holds each pserver's state at a single
position in that pserver's feed. Arrays are replaced, never changed, so a reader may keep an array.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.client.following.tables import FollowedTables, array_of
from flightedl.domain.feed.follower import FollowedFeeds, Use
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.placement import BUCKETS
from flightedl.errors import MessageError
from flightedl.kernels.half_precision import KINDS, array_dtype, float32_of
from flightedl.messages.feed import ChangesHeader, Position
from flightedl.rowstore.tables import RowTables
from flightedl.wire.changes import Change

Array = npt.NDArray[Any]


class Received:
    """A base or increment that is being received."""

    def __init__(self, model: FollowedModel, header: ChangesHeader, asked: float) -> None:
        self.header = header
        self.asked = asked
        self._model = model
        #: New store for the rows of a base; None for an increment, or if the base has no buckets.
        self.store: RowTables | None = model.tables.begin() if header.since is None and header.buckets else None
        self.changes: list[Change] = []
        self._count = 0
        self.is_complete = False

    def add(self, changes: Iterable[Change]) -> None:
        """Add the content of a batch. Raises MessageError if changes are missing, or do not match the model."""
        for change in changes:
            if change.kind == "end":
                if change.block != self._count:
                    raise MessageError(f"{self._count} changes arrived, but {change.block} were sent")
                self.is_complete = True
                return
            self._count += 1
            if self.header.wire and (change.kind, change.name) in self._model.floats:
                bits = array_of(change.values, np.uint16, change.name)
                change = change._replace(values=float32_of(bits, self.header.wire))  # noqa: PLW2901
            if change.kind == "rows" and self.store is not None:
                self._model.tables.add(self.store, change)
            else:
                self._model.check(change)
                self.changes.append(change)


class FollowedModel:
    """A copy of a model. Thread-safe.

    Args:
        plan: Plan of the model.
        life: As for ``FollowedFeeds``.
    """

    def __init__(self, plan: ShardPlan, life: int = 0) -> None:
        self.plan = plan
        #: Pserver -> newest instant at which its part of the copy is known to have been up to date.
        self.fresh: dict[int, float] = {}
        #: Number of blocks and buckets.
        self._count = plan.block_count + (BUCKETS if plan.tables else 0)
        self._lock = threading.Lock()
        self._feeds = FollowedFeeds(life)
        self._dtypes = {spec.name: array_dtype(spec.dtype) for spec in plan.parameters}
        #: Flat arrays. When a parameter changes, a new array replaces the old one.
        self._arrays = {spec.name: np.zeros(spec.size, self._dtypes[spec.name]) for spec in plan.parameters}
        self._shapes = {spec.name: spec.shape for spec in plan.parameters}
        self._missing = set(range(plan.block_count))
        self.tables = FollowedTables(plan.tables)
        #: Kinds and names of changes whose values are float32, unless they were rounded for sending.
        self.floats = {("values", spec.name) for spec in plan.parameters if spec.dtype == "float32"}
        self.floats |= {("rows", spec.name) for spec in plan.tables if spec.dtype == "float32"}

    @property
    def life(self) -> int:
        """Life of the model to which the copy belongs; 0 if it is not known yet."""
        return self._feeds.life

    def since(self, server: int) -> Position | None:
        """Return the position after which a pserver's changes are needed; None to request a base."""
        with self._lock:
            return self._feeds.since(server)

    def positions(self) -> dict[int, Position]:
        """Return the last applied position of each pserver."""
        with self._lock:
            return self._feeds.positions()

    def begin(self, header: ChangesHeader, asked: float) -> Received:
        """Return an empty message, to be filled and passed to ``apply``.

        Args:
            header: The message's header.
            asked: Instant of the request.

        Raises:
            MessageError: the header names other blocks, buckets or types of numbers than those of the model.
        """
        limits = (header.blocks, self.plan.block_count), (header.buckets, BUCKETS), (header.leaving, self._count)
        for ranges, count in limits:
            is_known = all(0 <= start <= stop <= count for start, stop in ranges)
            if not is_known or sum(stop - start for start, stop in ranges) > count:
                raise MessageError("a message of the feed names blocks that the job does not have")
        if header.wire not in KINDS:
            raise MessageError(f"a message of the feed has numbers of the unknown type {header.wire!r:.40}")
        return Received(self, header, asked)

    def check(self, change: Change) -> None:
        """Raise MessageError if a change does not match the model."""
        if change.kind == "values":
            self._values_of(change)
        else:
            self.tables.check(change)

    def apply(self, server: int, received: Received) -> Use:
        """Apply a pserver's complete message unless it is outdated or does not match; see ``FollowedFeeds``."""
        header = received.header
        values = [change for change in received.changes if change.kind == "values"]
        others = [change for change in received.changes if change.kind != "values"]
        first = self.plan.block_count
        blocks = [block for start, stop in header.blocks for block in range(start, stop)]
        buckets = [first + bucket for start, stop in header.buckets for bucket in range(start, stop)]
        with self._lock:
            use = self._feeds.use_of(server, header)
            if use is not Use.APPLY:
                return use
            numbers = blocks + buckets
            owned = self._feeds.owned(header, numbers)
            arrays = self._changed([change for change in values if change.block in owned])
            mine = np.zeros(BUCKETS, np.bool_)
            mine[[number - first for number in buckets if number in owned]] = True
            self.tables.apply(server, others, received.store, mine)
            self._arrays = {**self._arrays, **arrays}
            self._feeds.applied(server, header, numbers, received.asked)
            self._missing.difference_update(numbers)
        return use

    def _changed(self, values: list[Change]) -> dict[str, Array]:
        """Return new arrays for the parameters whose values have changed."""
        found: dict[str, Array] = {}
        for change in values:
            if change.name not in found:
                found[change.name] = self._arrays[change.name].copy()
            found[change.name][change.start : change.stop] = self._values_of(change)
        for array in found.values():
            array.flags.writeable = False
        return found

    def _values_of(self, change: Change) -> Array:
        known = self._arrays.get(change.name)
        if known is None or not 0 <= change.start <= change.stop <= known.size:
            raise MessageError(f"the job has no such elements of {change.name!r:.80}")
        data = array_of(change.values, known.dtype, change.name)
        if data.size != change.stop - change.start:
            raise MessageError(f"values of {change.name!r:.80} have another size than declared")
        return data

    @property
    def is_complete(self) -> bool:
        """True if the content of each block and bucket has arrived."""
        with self._lock:
            return not self._missing and self.tables.is_complete

    def covers(self, begun: float) -> bool:
        """True if the copy has all changes that the pservers had at an instant; see ``FollowedFeeds.covers``."""
        with self._lock:
            return self._feeds.covers(range(self._count), begun)

    @property
    def checkpoint(self) -> int | None:
        """Number of the checkpoint whose state the copy has exactly; None if there is none."""
        with self._lock:
            return self._feeds.checkpoint(range(self._count))

    def waits(self, server: int) -> bool:
        """True if a pserver's part has reached the newest checkpoint; see ``FollowedFeeds.waits``."""
        with self._lock:
            return self._feeds.waits(server)

    def arrays(self) -> dict[str, Array]:
        """Return all parameters, with their values after the same message."""
        arrays = self._arrays
        return {name: array.reshape(self._shapes[name]) for name, array in arrays.items()}

    def array(self, name: str) -> Array:
        """Return a parameter. Raises KeyError if it does not exist."""
        return self._arrays[name].reshape(self._shapes[name])

    def read(self, name: str, ids: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.float32], int]:
        """Return the (n, dim) values of distinct ids, and the number of ids that have a row."""
        with self._lock:
            return self.tables.read(name, ids)

    def rows(self, name: str) -> tuple[npt.NDArray[np.uint64], Array]:
        """Return the ids and values of all rows of a table; 16-bit values as their bits."""
        with self._lock:
            chunks = list(self.tables.rows(name))
        ids = [np.empty(0, np.uint64), *(chunk.ids for chunk in chunks)]
        values = [chunk.values for chunk in chunks]
        return np.concatenate(ids), np.concatenate(values) if values else np.empty((0, 0), np.float32)
