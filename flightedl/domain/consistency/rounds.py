"""Rounds, clocks and versions of one block, which decide when the block applies gradients.

``BlockRounds`` makes the decisions for one block. The caller holds the block's lock during each call *and* while it
acts on the answer (by accumulating, running the optimizer, or marking the batch as applied), so that the two are
atomic.

**Sync.** ``version`` is the number of closed rounds, and therefore also the number of the open round. The rules are:

* A member contributes to rounds from its *first round* on, and only to the open round. A push with an older base
  version is ``Stale``: the trainer pulls, recomputes the gradient and pushes again with the same batch identity. A push
  with a newer base version is an error.
* A batch that the block has already applied contributes nothing. If its base is the open round, its sender has
  *arrived* with weight 0. If its base is older, the message is a repetition and changes nothing.
* A round waits for its *due* members: those whose first round is not above it. It closes when all of its due members
  have arrived and there is at least one.
* The contributions of members that have left remain in the round, because their batches are marked. A round with
  contributions therefore also closes if no member is due, even if the view is empty; otherwise, the last gradients of a
  job might never be applied.
* *Catching up.* If no member is due, the round has no contributions, and members start at a later round, then the
  version jumps to the lowest first round, without updates. Blocks that are behind, for example because they were
  restored from an older checkpoint, thus rejoin the others at the round where the members start.
* A member's second batch in a round is added like its first. A trainer sends a second batch if its task was revoked
  after the first batch had been pushed to only some blocks: it drops that batch and continues with the next one and the
  same base.
* With ``backup=b``, a round also closes when all but ``b`` of its due members, and at least one, have arrived. A late
  gradient is added to the open round (``Accumulate(is_late=True)``), but its sender does not count as arrived there.
  Otherwise versions would diverge, and a joining member could wait for one block while another block waits for it.
* With ``backup``, the versions of blocks differ by at most 1, provided that each trainer pulls all blocks at base + 1
  or later and pushes to all of them with *one* base: the lowest version that it pulled.

**Async.** Every gradient is applied on arrival, and ``version`` is the number of accepted pushes. It includes pushes
without a gradient for this block, so that schedules, which depend on the version, give all blocks the same rate.
Membership only fences off former members. A base version above the block's own is also ``Stale``, because the pserver
may have been restored from an older checkpoint since the sender pulled. The sender pulls the current values and pushes
again.

**Bounded.** Like async, but each member has a *clock*: its first round plus the *step* in its push, which counts the
batches that the trainer has begun since it was admitted. A pull waits while the puller's clock is more than
``staleness`` above that of the slowest member.

First rounds and steps are the same for all blocks, so all blocks agree on the slowest member, which may always proceed.
If each block counted arrivals instead, a repeated message or a partly pushed batch could make the clocks of blocks
diverge, until two members waited for each other at different blocks.

A *pull* with an outdated membership is answered with ``NOT_MEMBER`` and never waits, because the round for which it
would wait may itself be waiting for the trainer's new membership.

Other modules decide which batches have already been applied (``applied``), and at which rounds members start
(``membership``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flightedl.domain.consistency.modes import Bounded, Mode, Sync
from flightedl.domain.consistency.rounds_values import (
    Accumulate,
    Apply,
    Arrival,
    Arrived,
    Closing,
    NotMember,
    Pull,
    Repeated,
    Stale,
)
from flightedl.domain.exactly_once.batches import Batch
from flightedl.errors import MessageError

_FIRST = Accumulate(is_first=True)
_NEXT = Accumulate(is_first=False)
_ARRIVED = Arrived()
_REPEATED = Repeated()
_NOT_MEMBER = NotMember()


@dataclass(frozen=True, slots=True)
class _Switch:
    mode: Mode
    at_version: int


class BlockRounds:
    """Consistency state of one block.

    Args:
        mode: ``Sync``, ``Async`` or ``Bounded``.
        version: Version of the block's initial values.
    """

    __slots__ = (
        "_arrived",
        "_backup",
        "_clocks",
        "_contributors",
        "_held",
        "_is_sync",
        "_missing",
        "_mode",
        "_staleness",
        "_switch",
        "_total_weight",
        "members",
        "version",
    )

    def __init__(self, mode: Mode, version: int = 0) -> None:
        #: Number of closed rounds (sync) or accepted pushes (async, bounded).
        self.version = version
        #: Member -> first round.
        self.members: dict[int, int] = {}
        #: Current and former members that have arrived in the open round.
        self._arrived: set[int] = set()
        #: Number of due members that have not arrived yet.
        self._missing = 0
        #: Member -> total weight of its contributions to the open round.
        self._contributors: dict[int, float] = {}
        self._total_weight = 0.0
        #: Batches in the open round's accumulator, each with the number of batches in its task.
        self._held: list[tuple[Batch, int]] = []
        #: Member -> its clock: its first round plus its highest step (bounded).
        self._clocks: dict[int, int] = {}
        self._switch: _Switch | None = None
        self._set_mode(mode)

    def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        self._is_sync = isinstance(mode, Sync)
        self._backup = mode.backup if isinstance(mode, Sync) else 0
        self._staleness = mode.staleness if isinstance(mode, Bounded) else None
        # All blocks switch at the same version, so these clocks are the same in all blocks.
        self._clocks = {}
        if self._staleness is not None:
            self._clocks = {member: max(first, self.version) for member, first in self.members.items()}

    @classmethod
    def moved(cls, mode: Mode, version: int, members: Mapping[int, int], clocks: Mapping[int, int]) -> BlockRounds:
        """Return the rounds of a block that another pserver has handed over while ``is_at_edge`` was true."""
        rounds = cls(mode, version)
        rounds.members, rounds._clocks = dict(members), dict(clocks)
        rounds._count_missing()
        return rounds

    @property
    def is_at_edge(self) -> bool:
        """True if no member has arrived in the open round and no mode change is pending."""
        return not (self._arrived or self._contributors or self._switch)

    def is_like(self, other: BlockRounds) -> bool:
        """True if both blocks are at the start of the same round and have the same members and clocks."""
        return (
            self.is_at_edge
            and other.is_at_edge
            and (self.version, self.members, self._clocks) == (other.version, other.members, other._clocks)
        )

    @property
    def clocks(self) -> Mapping[int, int]:
        return self._clocks

    def copy(self) -> BlockRounds:
        other = BlockRounds.__new__(BlockRounds)
        for name in BlockRounds.__slots__:
            value = getattr(self, name)
            setattr(other, name, value.copy() if isinstance(value, dict | set | list) else value)
        return other

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def position(self) -> int:
        """The number to which first rounds are compared: the open round (sync) or the slowest clock (bounded)."""
        if self._is_sync or self._staleness is None:
            return self.version
        return min(self._clocks.values(), default=0)

    @property
    def total_weight(self) -> float:
        return self._total_weight

    @property
    def held(self) -> tuple[tuple[Batch, int], ...]:
        """Marked batches in the accumulator, each with the number of batches in its task.

        Snapshots exclude the accumulator, so they must remove these marks.
        """
        return tuple(self._held)

    def waits_for(self) -> list[int]:
        if not self._is_sync:
            return []
        return [m for m, first in self.members.items() if first <= self.version and m not in self._arrived]

    def holds_up(self) -> list[int]:
        """Return the members for which others wait: those missing from the round, or the slowest ones (bounded)."""
        if self._is_sync:
            is_awaited = self._arrived or any(first > self.version for first in self.members.values())
            return self.waits_for() if is_awaited else []
        if self._staleness is None or not self._clocks:
            return []
        slowest = min(self._clocks.values())
        is_waited_for = max(self._clocks.values()) - slowest > self._staleness
        return [member for member, clock in self._clocks.items() if clock == slowest] if is_waited_for else []

    # pushes

    def arrive(
        self,
        member: int,
        base_version: int,
        weight: float,
        *,
        already_applied: bool,
        batch: Batch,
        batch_count: int = 0,
        step: int = 0,
        others: Sequence[tuple[Batch, int]] = (),
    ) -> Arrival:
        """Handle a member's push of a batch to this block.

        Args:
            member: Member id of the sender.
            base_version: Version of the values from which the gradient was computed.
            weight: Weight of the gradient; 0 if there is none.
            already_applied: True if the block has applied the batch, from any sender.
            batch: Identity of the batch.
            batch_count: Number of batches of its task, kept for ``held``.
            step: Number of batches that the trainer has begun since it was admitted (bounded; ignored in other modes).
            others: The other batches of a sum, each with the number of batches of its task.

        Raises:
            MessageError: the base version is above the open round (sync); nothing was done.
        """
        first = self.members.get(member)
        if first is None:
            return _NOT_MEMBER
        version = self.version
        if self._is_sync:
            if base_version > version:
                raise MessageError(f"base version {base_version} is in the future: the open round is {version}")
            if base_version < version or first > version:
                return self._arrive_late(member, base_version, weight, already_applied, (batch, batch_count))
            return self._arrive_in_time(member, weight, already_applied, (batch, batch_count), others)
        if base_version > version and not already_applied:
            return Stale(version)
        if self._staleness is not None and (clock := first + step) > self._clocks[member]:
            self._clocks[member] = clock
            if already_applied:
                return _ARRIVED
        if already_applied:
            return _REPEATED
        self.version += 1
        return Apply(version - base_version) if weight else _ARRIVED

    def _arrive_in_time(
        self,
        member: int,
        weight: float,
        already_applied: bool,
        batch: tuple[Batch, int],
        others: Sequence[tuple[Batch, int]],
    ) -> Arrival:
        has_arrived = member in self._arrived
        if has_arrived:
            if already_applied:
                return _REPEATED
        else:
            self._arrived.add(member)
            self._missing -= 1
        if already_applied or not weight:
            return _ARRIVED
        self._held += others
        return self._contribute(member, weight, batch)

    def _contribute(self, member: int, weight: float, batch: tuple[Batch, int]) -> Accumulate:
        contributors = self._contributors
        is_first = not contributors
        contributors[member] = contributors.get(member, 0.0) + weight
        self._total_weight += weight
        self._held.append(batch)
        return _FIRST if is_first else _NEXT

    def _arrive_late(
        self, member: int, base_version: int, weight: float, already_applied: bool, batch: tuple[Batch, int]
    ) -> Arrival:
        if already_applied:
            return _REPEATED
        first = self.members[member]
        if not self._backup or base_version < first:
            return Stale(max(first, self.version))
        if not weight:
            return _ARRIVED
        return Accumulate(self._contribute(member, weight, batch).is_first, is_late=True)

    # pulls

    def pull(self, member: int, min_version: int) -> Pull:
        """Decide whether values may be read now. ``member`` is 0 for clients that only read."""
        if not member:
            return Pull.READY if self.version >= min_version else Pull.WAIT
        first = self.members.get(member)
        if first is None:
            return Pull.NOT_MEMBER
        if self._is_sync and self.version < first:
            return Pull.WAIT
        if self.version < min_version or (self._staleness is not None and not self.may_proceed(member)):
            return Pull.WAIT
        return Pull.READY

    def may_proceed(self, member: int) -> bool:
        """True if a member is not too far ahead of the slowest member (bounded). Always true in other modes."""
        if self._staleness is None:
            return True
        return self._clocks[member] - min(self._clocks.values()) <= self._staleness

    # rounds

    def may_update(self, member: int, base_version: int) -> bool:
        """True if the optimizer may have to run when this member arrives, so that the caller can prepare for it."""
        if not self._is_sync:
            return True
        is_due = base_version == self.version and self.members.get(member, base_version + 1) <= base_version
        return is_due and self._missing - (member not in self._arrived) <= self._backup

    def closable(self) -> bool:
        """True if ``close`` must be called now. Check this after every event, and again after each ``close``."""
        if not self._is_sync:
            return False
        if self._missing == 0:
            # All due members have arrived, or none is due.
            return bool(self._contributors) or self._has_arrivals() or self._next_start() > self.version
        return self._missing <= self._backup and self._has_arrivals()

    def _has_arrivals(self) -> bool:
        return not self._arrived.isdisjoint(self.members)

    def _next_start(self) -> int:
        """Return the round at which catching up ends: the lowest first round, but at least the open round."""
        if self._switch is not None:
            start = min([*self.members.values(), self._switch.at_version])
        else:
            start = min(self.members.values(), default=self.version)
        return max(start, self.version)

    def close(self) -> Closing:
        """Close the open round, or catch up if it has no contributions. Call this only if ``closable``."""
        assert self.closable(), "this round still waits for members"
        closing = Closing(self.version, self._total_weight, self._contributors, frozenset(self._arrived), self._held)
        is_empty = not self._contributors and not self._has_arrivals()
        self.version = self._next_start() if is_empty else self.version + 1
        self._arrived = set()
        self._contributors = {}
        self._total_weight = 0.0
        self._held = []
        if self._switch is not None and self.version >= self._switch.at_version:
            self._set_mode(self._switch.mode)
            self._switch = None
        self._count_missing()
        return closing

    def _count_missing(self) -> None:
        version, arrived = self.version, self._arrived
        self._missing = sum(first <= version and m not in arrived for m, first in self.members.items())

    # the view

    def can_admit(self, first_round: int) -> bool:
        """False if a round that should have waited for the member has already closed."""
        return not self._is_sync or first_round >= self.version

    def change(self, admit: Mapping[int, int], remove: Iterable[int]) -> None:
        """Replace the members (member -> first round) in one step. Check ``closable`` afterwards.

        Raises:
            MessageError: an admitted member's first round is already closed; nothing was changed.
        """
        for member, first in admit.items():
            if not self.can_admit(first):
                raise MessageError(f"member {member} cannot start at round {first}: round {self.version} is open")
        for member in remove:
            self.members.pop(member, None)
            self._clocks.pop(member, None)
        for member, first in admit.items():
            self.members[member] = first
            if self._staleness is not None:
                self._clocks.setdefault(member, first)
        self._count_missing()

    def can_switch(self, at_version: int) -> bool:
        """True if the mode may change at this version, once all members have been removed."""
        has_begun = bool(self._arrived or self._contributors)
        return at_version >= self.version + has_begun

    def switch(self, mode: Mode, at_version: int) -> None:
        """Change the mode at a version on which all blocks have agreed.

        In sync mode, the block changes its mode when the round ``at_version`` opens. In other modes the versions of
        blocks differ, while sync mode requires equal versions. So the block changes its mode immediately and sets its
        version to ``at_version``. The view that changes the mode contains only new members, which start at
        ``at_version``.

        Raises:
            MessageError: the version is in the past; nothing was changed. Agree on a later one.
        """
        if at_version < self.version:
            raise MessageError(f"the mode cannot change at version {at_version}: the block is at {self.version}")
        if self._is_sync and at_version > self.version:
            self._switch = _Switch(mode, at_version)
            return
        if self._is_sync and (self._arrived or self._contributors):
            raise MessageError(f"the mode cannot change at version {at_version}: that round has begun")
        self.version = at_version
        self._switch = None
        self._set_mode(mode)
        self._count_missing()

    def check(self) -> None:
        assert self.version >= 0, "a negative version"
        if not self._is_sync:
            assert not self._arrived, "arrivals are kept outside of sync mode"
            assert not self._contributors, "contributions are held outside of sync mode"
        else:
            assert self._missing == len(self.waits_for()), "wrong count of missing members"
        assert bool(self._contributors) == bool(self._held), "contributions and held batches differ"
        assert abs(self._total_weight - sum(self._contributors.values())) <= 1e-6 * (1 + self._total_weight)
        assert self._clocks.keys() == (self.members.keys() if self._staleness is not None else set())
        assert self._switch is None or self._switch.at_version > self.version, "a switch is overdue"
