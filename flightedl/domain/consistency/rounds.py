"""When a block takes its updates: rounds, clocks and versions.

One ``BlockRounds`` decides for one block; the caller holds the block's lock around every call *and* around what the
answer tells it to do (accumulate, run the optimizer, mark the batch as applied), so that both are one step.

**Sync.** ``version`` is the number of rounds closed, and the number of the open one. Rules:

* A member contributes to rounds from its *first round* on, and to the open round only: an older base version is
  ``Stale`` (pull, recompute, push again under the same identity), a newer one cannot be: an error.
* A batch that the block has already is no contribution: at the open round's base its sender has *arrived*, with weight
  zero; at an older base it is a repeated message, which changes nothing.
* A round waits for its *due* members: those of the view whose first round is not above it. It closes when all of them
  have arrived and somebody did. Contributions of members that left stay in their round, because their batches are
  marked: a round that holds some closes as soon as nobody is due, also when the view is empty. Otherwise the last
  gradients of a job could stay in an accumulator for ever.
* *Catching up.* When nobody is due and nothing is held, but members wait for a later round, the version moves up to the
  lowest first round at once, by rounds that close without an update. So blocks that are behind, as those of a pserver
  restored from an older checkpoint are, meet the others at the round where the members start.
* A member's second batch in one round is added like the first. It happens when a trainer gives a half-pushed batch up,
  because its task was taken away, and goes on with the next one at the same base.
* ``backup=b``: a round also closes when all but ``b`` due members arrived, at least one. A late gradient, of an older
  base, is then added to the open round (``Accumulate(is_late=True)``), but its sender has not arrived there. This
  keeps the versions of all blocks within one of each other provided that a trainer pulls all blocks at or above its
  base + 1, and pushes all of them with *one* base: the lowest version that it pulled. Counting late ones as arrived
  would let the blocks' versions drift apart for good, and a joining member wait for one block while another block
  waits for it.

**Async.** Every gradient is applied on arrival; ``version`` counts them. Membership is only a fence. A base version
above the block's is ``Stale`` too: it is a mistake, or of values that a pserver had before it was restored from an
older checkpoint. The two cannot be told apart, and need not be: the sender pulls what there is now, and pushes again.

**Bounded.** As async, but each member has a *clock*: its first round plus the *step* that its push names, which is the
number of the batch among those that the trainer began since it was admitted. A pull waits while the puller's clock is
more than ``staleness`` above the slowest member's. First rounds and steps are the same on all blocks, so all blocks
agree on who is ahead, and the slowest may always go on. Counting arrivals on each block instead would let the clocks
differ after a duplicated message or a half-pushed batch, until two members wait for each other on different blocks.

A *pull* of somebody who names a membership that is gone is answered ``NOT_MEMBER``, never left waiting: the round that
it waits for may be waiting for its new membership.

Not decided here: whether a batch was applied (``applied``), and that members' first rounds are agreed (``membership``).
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
_FURTHER = Accumulate(is_first=False)
_ARRIVED = Arrived()
_REPEATED = Repeated()
_NOT_MEMBER = NotMember()


@dataclass(frozen=True, slots=True)
class _Switch:
    mode: Mode
    at_version: int


class BlockRounds:
    """The consistency state of one block.

    Args:
        mode: ``Sync``, ``Async`` or ``Bounded``.
        version: Of the values that the block starts with.
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
        #: Rounds closed (sync) or updates applied (async, bounded).
        self.version = version
        #: Member -> first round.
        self.members: dict[int, int] = {}
        #: Who arrived in the open round, members or not any more.
        self._arrived: set[int] = set()
        #: Due members that have not arrived.
        self._missing = 0
        #: Member -> weight in the open round.
        self._contributors: dict[int, float] = {}
        self._total_weight = 0.0
        #: Batches in the accumulator of the open round.
        self._held: list[tuple[Batch, int]] = []
        #: Member -> first round + highest step brought (bounded).
        self._clocks: dict[int, int] = {}
        self._switch: _Switch | None = None
        self._set_mode(mode)

    def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        self._is_sync = isinstance(mode, Sync)
        self._backup = mode.backup if isinstance(mode, Sync) else 0
        self._staleness = mode.staleness if isinstance(mode, Bounded) else None
        # All blocks switch at one version, so these clocks are the same on all of them.
        self._clocks = {}
        if self._staleness is not None:
            self._clocks = {member: max(first, self.version) for member, first in self.members.items()}

    @classmethod
    def moved(cls, mode: Mode, version: int, members: Mapping[int, int], clocks: Mapping[int, int]) -> BlockRounds:
        """Return those of a block that another pserver had, ``is_at_edge``."""
        rounds = cls(mode, version)
        rounds.members, rounds._clocks = dict(members), dict(clocks)
        rounds._count_missing()
        return rounds

    @property
    def is_at_edge(self) -> bool:
        """True if nobody has arrived in the open round, and no change of the mode waits for a round."""
        return not (self._arrived or self._contributors or self._switch)

    @property
    def clocks(self) -> Mapping[int, int]:
        """Member -> its clock (bounded; empty in other modes)."""
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
        """What a first round is compared with: the open round (sync), the slowest member's clock (bounded)."""
        if self._is_sync or self._staleness is None:
            return self.version
        return min(self._clocks.values(), default=0)

    @property
    def total_weight(self) -> float:
        return self._total_weight

    @property
    def held_batches(self) -> tuple[Batch, ...]:
        """Batches that are marked but wait in the accumulator: a snapshot without the accumulator must unmark them."""
        return tuple(batch for batch, _ in self._held)

    @property
    def held(self) -> tuple[tuple[Batch, int], ...]:
        """``held_batches``, each with the number of batches of its task."""
        return tuple(self._held)

    def waits_for(self) -> list[int]:
        """Due members that have not arrived in the open round."""
        if not self._is_sync:
            return []
        return [m for m, first in self.members.items() if first <= self.version and m not in self._arrived]

    def holds_up(self) -> list[int]:
        """Members for whom others wait: who has not arrived in a round that has begun, or is too far behind.

        A round is waited for by those who have arrived in it, and by those who join after it.
        """
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
        further: Sequence[tuple[Batch, int]] = (),
    ) -> Arrival:
        """A member brings a batch to this block.

        Args:
            member: Who.
            base_version: Of the values the gradient was computed from.
            weight: Of the gradient; 0 says that there is none.
            already_applied: Whether the block has the batch, whoever brought it.
            batch: Its identity.
            batch_count: Batches of its task; only remembered, for ``held``.
            step: How many batches the trainer has begun since it was admitted (bounded; ignored in other modes).
            further: The other batches of a sum, each with the number of batches of its task.

        Raises:
            MessageError: the base version is in the future (sync); nothing was done.
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
            return self._arrive_in_time(member, weight, already_applied, (batch, batch_count), further)
        if base_version > version and not already_applied:
            return Stale(version)
        if self._staleness is not None and (clock := first + step) > self._clocks[member]:
            self._clocks[member] = clock
            if already_applied:
                return _ARRIVED
        if already_applied:
            return _REPEATED
        if not weight:
            return _ARRIVED
        self.version += 1
        return Apply(version - base_version)

    def _arrive_in_time(
        self,
        member: int,
        weight: float,
        already_applied: bool,
        batch: tuple[Batch, int],
        further: Sequence[tuple[Batch, int]],
    ) -> Arrival:
        """Bring a batch to the open round."""
        has_arrived = member in self._arrived
        if has_arrived:
            if already_applied:
                return _REPEATED
        else:
            self._arrived.add(member)
            self._missing -= 1
        if already_applied or not weight:
            return _ARRIVED
        self._held += further
        return self._contribute(member, weight, batch)

    def _contribute(self, member: int, weight: float, batch: tuple[Batch, int]) -> Accumulate:
        contributors = self._contributors
        is_first = not contributors
        contributors[member] = contributors.get(member, 0.0) + weight
        self._total_weight += weight
        self._held.append(batch)
        return _FIRST if is_first else _FURTHER

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
        """Whether values may be read now; ``member`` 0 is anybody who only reads."""
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
        """Whether a member is near enough to the slowest one (bounded); always True in the other modes."""
        if self._staleness is None:
            return True
        return self._clocks[member] - min(self._clocks.values()) <= self._staleness

    # rounds

    def may_update(self, member: int, base_version: int) -> bool:
        """Whether a member's arrival, if it counts, lets the optimizer run: what that takes is got ready before."""
        if not self._is_sync:
            return True
        is_due = base_version == self.version and self.members.get(member, base_version + 1) <= base_version
        return is_due and self._missing - (member not in self._arrived) <= self._backup

    def closable(self) -> bool:
        """Whether ``close`` is to be called now; ask after every event, until False."""
        if not self._is_sync:
            return False
        if self._missing == 0:
            # All due members are here, or none is due.
            return bool(self._contributors) or self._has_arrivals() or self._next_start() > self.version
        return self._missing <= self._backup and self._has_arrivals()

    def _has_arrivals(self) -> bool:
        return not self._arrived.isdisjoint(self.members)

    def _next_start(self) -> int:
        """Where catching up ends: the lowest first round, if nobody is due before; else the open round."""
        if self._switch is not None:
            start = min([*self.members.values(), self._switch.at_version])
        else:
            start = min(self.members.values(), default=self.version)
        return max(start, self.version)

    def close(self) -> Closing:
        """Close the open round; call only when ``closable``. Without anything held this catches up in one step."""
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
        """False when rounds that a member would be due in have been closed without it."""
        return not self._is_sync or first_round >= self.version

    def change(self, admit: Mapping[int, int], remove: Iterable[int]) -> None:
        """Admit members (-> first round) and remove others in one step; then ask ``closable``.

        Raises:
            MessageError: an admitted member's first round is closed already; nothing was changed.
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
        """Whether the mode may change at this version, once nobody is a member any more."""
        has_begun = bool(self._arrived or self._contributors)
        return at_version >= self.version + has_begun

    def switch(self, mode: Mode, at_version: int) -> None:
        """Change the mode at a version that is agreed for all blocks.

        From sync the block switches when its round ``at_version`` opens. From async or bounded it switches now, and its
        version becomes ``at_version``: there versions differ from block to block, and rounds need equal ones. Such a
        switch comes with a view in which every member is new and starts at ``at_version``.

        Raises:
            MessageError: the version is past; nothing was changed. Agree on a later one.
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
        assert self._switch is None or self._switch.at_version > self.version, "a switch was missed"
