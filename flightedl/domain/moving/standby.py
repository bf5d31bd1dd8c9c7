"""Decisions about standby pservers: which pserver a standby follows, which copy it has, and who may claim an index.

A *standby* is a process without an index that has a copy of the blocks of one pserver, its *source*. If the source
dies, the standby claims its index and serves the copied blocks. It is then a process that was restored from an older
state, like one that has loaded a checkpoint, so the master reopens the tasks that the copy lacks.

Rules:

* A copy is a cut: it contains the values of all blocks, and exactly the batches that are in these values.
* A standby takes over a copy as a whole, or not at all. The parts of a copy that contains only changes wait until the
  last part has arrived. A copy of everything overwrites the earlier content, which is then unusable until the end.
* A copy contains only changes if the standby has the source's newest copy. Otherwise, the source sends everything,
  because it no longer knows what has changed since an older copy. It also sends everything if rows have moved to it
  since the newest copy, because it does not know which rows were removed elsewhere.
* A copy belongs to an election. It is unusable when the model has been initialized again.
* A copy belongs to a layout: the blocks that a placement assigns to the source. It is unusable when blocks have moved.
  The standby then starts over, once no blocks are moving anymore: a change consists of many moves, with short pauses.
* While a standby of an index is alive, only this standby may claim the index. The transaction that claims the index
  compares this, because a process may have read an older state.
* If an index without a standby stays free, the newest standby drops its copy, so that it can claim this index. There
  may be no other process: a restarted one can become a standby before the lease of its predecessor ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from flightedl.messages.moving import CopyId

__all__ = [
    "UNCLAIMED_S",
    "Claim",
    "CopyId",
    "CopySource",
    "Sent",
    "StandbyCopy",
    "claims",
    "has_unclaimed",
    "index_to_follow",
    "keeps_following",
]

#: Seconds after which a standby claims a free index that has no standby, because no other process does.
UNCLAIMED_S = 5.0


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """The newest copy that a source has begun to send, and the standby that receives it."""

    standby: int
    copy: CopyId


class CopySource:
    """State machine of the copies that one pserver process sends. Not thread-safe.

    Args:
        generation: Generation of the process.
        newest: The newest copy; None before the first one.
    """

    def __init__(self, generation: int, newest: Sent | None = None) -> None:
        self._generation = generation
        self.newest = newest

    def begin(self, standby: int, has: CopyId | None, election: int, *, knows_changes: bool) -> CopyId:
        """Begin the next copy.

        Args:
            standby: Generation of the standby that requests the copy.
            has: Copy that the standby has; None if it has none.
            election: Election of the values.
            knows_changes: True if all changes since the newest copy are known.
        """
        number = 1 if self.newest is None else self.newest.copy.number + 1
        is_next = self.newest == Sent(standby, has) if has is not None else False
        after = has.number if has is not None and is_next and knows_changes and has.election == election else 0
        copy = CopyId(self._generation, election, number, after)
        self.newest = Sent(standby, copy)
        return copy


class StandbyCopy:
    """State machine of the copy that a standby has. Not thread-safe.

    Args:
        has: The complete copy; None if there is none.
        receiving: The copy that is arriving; None if there is none.
    """

    def __init__(self, has: CopyId | None = None, receiving: CopyId | None = None) -> None:
        self.has = has
        self.receiving = receiving
        #: The facts that determine the blocks of a copy; None before the first ``follow``.
        self.layout: object = None
        self._plan_hash = ""

    def waits(self, layout: object, plan_hash: str, *, is_moving: bool) -> bool:
        """True if the standby must wait before it starts over with other blocks. It has no copy while it waits.

        Args:
            layout: The new layout.
            plan_hash: Shard plan with the newest placement.
            is_moving: True while blocks of any pserver are moving.
        """
        is_stable, self._plan_hash = plan_hash == self._plan_hash, plan_hash
        waits = layout != self.layout and (is_moving or (self.layout is not None and not is_stable))
        if waits:
            self.has = None
        return waits

    def follow(self, layout: object) -> bool:
        """Prepare for copies of blocks with this layout. Return True if the content was for another layout."""
        is_new = layout != self.layout
        if is_new:
            self.has, self.receiving, self.layout = None, None, layout
        return is_new

    def begin(self, copy: CopyId) -> bool:
        """Begin to receive a copy. Return False if it does not follow the copy that the standby has."""
        self.receiving = None
        if not copy.after:
            self.has = None
        elif self.has is None or (self.has.source, self.has.election, self.has.number) != (
            copy.source,
            copy.election,
            copy.after,
        ):
            return False
        self.receiving = copy
        return True

    @property
    def is_kept_back(self) -> bool:
        """True if the parts of the arriving copy must not change the content before the last part has arrived."""
        return self.receiving is not None and self.receiving.after > 0

    def overwrite(self) -> None:
        """Record that the content is about to change, so that it is unusable until ``end``."""
        self.has = None

    def end(self, blocks: Sequence[int], received: Sequence[int]) -> bool:
        """Record that the arriving copy is complete, and is now the content.

        Args:
            blocks: Blocks of the layout, in ascending order.
            received: Blocks of the content, in ascending order.

        Returns:
            False if the blocks differ, because the source knew another placement. There is then no usable content.
        """
        assert self.receiving is not None, "no copy is arriving"
        self.has, self.receiving = (self.receiving if blocks == received else None), None
        return self.has is not None

    def fail(self) -> None:
        """Give up the arriving copy."""
        self.receiving = None

    def is_usable(self, election: int | None, layout: object) -> bool:
        """True if the content can be served as blocks with this layout.

        ``election`` gave the model its current first values.
        """
        return self.has is not None and self.has.election == election and self.layout == layout


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """An attempt to claim an index."""

    index: int
    #: Generation of the standby whose key must exist and is deleted; 0 if no standby of this index may exist.
    standby: int = 0


def claims(
    desired: int, taken: Collection[int], standbys: Mapping[int, int], own: tuple[int, int] | None
) -> Iterator[Claim]:
    """Yield the claims that a process may attempt.

    Args:
        desired: Number of the job's pservers.
        taken: Indexes that other processes hold.
        standbys: Index -> generation of the live standby.
        own: Index and generation of this process as a standby; None if it is not a standby.
    """
    for index in range(desired):
        if index not in taken and (own[0] == index if own is not None else index not in standbys):
            yield Claim(index, 0 if own is None else own[1])


def index_to_follow(desired: int, taken: Collection[int], standbys: Collection[int]) -> int | None:
    """Return the lowest index of a pserver without a standby, or None if there is none, or an index to claim."""
    without = (index for index in range(desired) if index not in standbys)
    return None if has_unclaimed(desired, taken, standbys) else next(without, None)


def has_unclaimed(desired: int, taken: Collection[int], standbys: Collection[int]) -> bool:
    """True if an index without a standby is free."""
    return any(index not in taken and index not in standbys for index in range(desired))


def keeps_following(
    own: tuple[int, int], desired: int, revision: int, standbys: Mapping[int, int], unclaimed_s: float
) -> bool:
    """True if a standby keeps following its pserver. Otherwise it drops its copy.

    Args:
        own: Index and generation of this process as a standby.
        desired: Number of the job's pservers.
        revision: Revision of the state in etcd from which ``standbys`` was read.
        standbys: Index -> generation of the live standby.
        unclaimed_s: Seconds for which an index without a standby has been free.
    """
    index, generation = own
    is_dismissed = revision >= generation and standbys.get(index) != generation
    is_needed = unclaimed_s >= UNCLAIMED_S and generation == max(standbys.values(), default=0)
    return index < desired and not is_dismissed and not is_needed
