"""The view: the trainers for which rounds wait, as agreed between the master and all pservers.

``membership`` is the master's side; it takes events and returns effects. ``views.PserverView`` is a pserver's side.

* A view contains the complete membership and is numbered by (master generation, serial). A pserver accepts only views
  newer than its own. Lost, late and repeated views, and views from a deposed master, are therefore harmless.
* *Leaving* takes effect at each pserver when the new view arrives there. It needs no agreement, because removing a
  member is always safe.
* *Joining* requires that all pservers agree on the member's first round. This round must be the same for all blocks:
  otherwise, one block might wait for the member while the member waits for another block. The master proposes the
  highest open round that it knows. A pserver admits the member unless the open round of one of its blocks is above this
  first round.
* When all pservers have admitted a member, its trainer gets the member id. If a pserver refuses a member, the master
  proposes the trainer again with a new id, at the highest reported open round plus a margin.
* The margin doubles with each refusal, because the number of rounds that close while a view is in flight depends on how
  long a round takes. The first proposal has no margin. After a trainer's first refusal, its margin is the one that was
  sufficient for other trainers, or half of that, but at most two rounds.
* A round reported by a member counts as open unless it is far above those reported by pservers.
* A *member id* is never reused: it combines the master's generation and a counter in one int64. Pushes with an old id
  are rejected, so the master may drop a member at any time and propose its trainer again; the trainer learns from the
  rejection.
* A *restarted pserver* (one with a new generation) has lost rounds, because its blocks start from a checkpoint. The
  master proposes all members again, starting at the highest open round of all pservers. No member is due before that
  round, so blocks that are behind catch up to it without updates (see ``rounds``).
* The applied sets show the master which batches were lost with the rounds of a restarted pserver; it assigns them
  again.
* *A new master* continues from the stored state with its own generation. The stored state may be outdated: members that
  it lacks are removed and ask to join again, and a member that a pserver does not know and can no longer admit is
  proposed again. A pserver whose generation differs from the stored one is treated as restarted.
* In bounded mode, the first round is where a member's clock starts. The same rules apply, except that pservers never
  refuse a member. In async mode, a view only fences off former members. A restarted pserver therefore gets the same
  view again.
* The *mode changes* when a view specifies another mode. All members of that view are new and start at its *switch
  round*. So gradients pushed in the old mode are applied before the switch round, and trainers push no gradients until
  all pservers have changed the mode.
* A pserver that has passed the switch round removes the old members but refuses the new mode. The master then proposes
  a later round and new member ids to all pservers. A process starts in the mode of its first view.

At most one view is in flight to each pserver. It is always the newest view, so trainers that join or leave at about the
same time share a view. The caller reports the answer (``answered``) or the failure (``send_failed``).

Effects come in this order: store the state, send views, notify trainers. Safety does not depend on the order.

A join cannot complete while a pserver is down, and may take long if rounds close faster than views arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from flightedl.domain.consistency.membership_values import Admitted, Effect, Member, Persist, SendView
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.errors import CorruptError, FencedError, JobFailedError, UnregisteredError, UsageError
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.decoding import from_msgpack

#: Number of low bits of a member id that hold the counter; the master's generation is above them.
_COUNTER_BITS = 22
_GENERATION_LIMIT = 1 << (63 - _COUNTER_BITS)
#: Maximum margin, in rounds.
_MARGIN_LIMIT = 1024
_USUAL_REFUSALS_LIMIT = 2
#: Maximum number of rounds by which a member's reported round may be above the highest open round of any pserver.
_BELIEVED_ROUNDS = 256
_FORMAT = 1
_SYNC = Sync()


@dataclass(slots=True)
class _Pserver:
    generation: int
    highest_open_round: int = 0
    is_up: bool = False
    #: Serial of this master's newest view that the pserver has answered; 0 if the pserver has answered none.
    answered_serial: int = 0
    #: Serial of the view in flight; None if there is none.
    sending: int | None = None


class _MemberRecord(msgspec.Struct, array_like=True):
    trainer: str
    generation: int
    member_id: int
    first_round: int
    is_admitted: bool


class _Record(msgspec.Struct, array_like=True):
    format: int
    master_generation: int
    members: list[_MemberRecord]
    #: (index, generation, highest open round)
    pservers: list[tuple[int, int, int]]
    mode: dict[str, Any] | None = None
    switch_round: int = 0


class Membership:
    """The master's view of the members, and the pservers' answers to it.

    Args:
        master_generation: Generation of this master; higher than that of every earlier master.
        pserver_count: Number of pservers, all of which must agree to a join.
        mode: Consistency mode of the job.
    """

    def __init__(self, master_generation: int, pserver_count: int, *, mode: Mode = _SYNC) -> None:
        if not 0 <= master_generation < _GENERATION_LIMIT:
            raise JobFailedError(
                f"master generation {master_generation} is too large for member ids, because the job was resumed too "
                "often. Begin a new job with the values of its checkpoint (fe.load)"
            )
        self._master_generation = master_generation
        self._pserver_count = pserver_count
        self._mode = mode
        #: The round at which the current mode began; members start there or later.
        self._switch_round = 0
        #: Serial of this master's first view with the current mode.
        self._switch_serial = 1
        self._switch_refusals = 0
        #: Highest round that any member has reported; 0 if unknown.
        self._reported_round = 0
        #: Expected number of refusals until the next member's margin is large enough.
        self._usual_refusals = 0
        #: True if all pservers have adopted the current mode.
        self._is_switched = False
        self._counter = 0
        #: Serial of the newest view. The first view, which is sent to all pservers, has serial 1.
        self._serial = 1
        self._members: dict[str, Member] = {}
        self._pservers: dict[int, _Pserver] = {}

    @property
    def view(self) -> ViewRequest:
        """The newest view. Its plan is not filled in yet."""
        return ViewRequest(
            plan_hash="",
            master_generation=self._master_generation,
            serial=self._serial,
            members=[
                ViewMember(trainer=m.trainer, generation=m.generation, member=m.member_id, first_round=m.first_round)
                for m in self._members.values()
            ],
            mode=self._mode.to_json(),
            switch_round=self._switch_round,
        )

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def switch_round(self) -> int:
        """The round at which the current mode began; 0 if the job began in this mode."""
        return self._switch_round

    @property
    def late_to_switch(self) -> list[int]:
        if self._is_switched:
            return []
        return [i for i in range(self._pserver_count) if not self._has_answered(i, self._switch_serial)]

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    @property
    def is_quiet(self) -> bool:
        return all(self._has_answered(i, self._serial) and self._pservers[i].is_up for i in range(self._pserver_count))

    def member_id_of(self, trainer: str) -> int | None:
        member = self._members.get(trainer)
        return member.member_id if member is not None and member.is_admitted else None

    def waiting_for(self, trainer: str) -> str:
        """Return a description of the pservers whose answers a trainer's join still needs; empty if none."""
        member = self._members.get(trainer)
        if member is None or member.is_admitted:
            return ""
        late = [str(i) for i in range(self._pserver_count) if not self._has_answered(i, member.serial)]
        return f"the answer of pserver {', '.join(late)} to round {member.first_round}"

    def resize(self, pserver_count: int) -> list[Effect]:
        """Change the number of pservers. Added pservers are then announced by ``pserver_up``."""
        self._pserver_count = pserver_count
        self._pservers = {index: each for index, each in self._pservers.items() if index < pserver_count}
        return self._settle([])

    # trainers

    def join(self, trainer: str, generation: int, margin: int = 0) -> list[Effect]:
        """Propose a trainer that holds tasks as a member. Does nothing if it has already been proposed.

        Args:
            trainer: Name of the trainer.
            generation: Generation of its registration.
            margin: Number of rounds from the highest open round to the first round of this member.

        Raises:
            UnregisteredError: a newer registration of this trainer is already a member.
        """
        member = self._members.get(trainer)
        if member is not None and generation < member.generation:
            raise UnregisteredError(f"trainer {trainer} was registered again by a newer process: stop this one")
        if member is not None and generation == member.generation:
            return []
        self._begin()
        self._propose(trainer, generation, refusals=0, margin=margin)
        return self._changed()

    def join_together(self, trainers: Mapping[str, int]) -> list[Effect]:
        """Propose several trainers (name -> generation). Those that are not yet members all start at the same round."""
        new = {
            name: generation
            for name, generation in sorted(trainers.items())
            if (member := self._members.get(name)) is None or generation > member.generation
        }
        if not new:
            return []
        self._begin()
        for name, generation in new.items():
            self._propose(name, generation, refusals=0)
        return self._changed()

    def leave(self, trainer: str, generation: int | None = None) -> list[Effect]:
        """Remove a trainer that has left or has no tasks, unless its generation differs from ``generation``."""
        member = self._members.get(trainer)
        if member is None or generation not in {None, member.generation}:
            return []
        self._begin()
        del self._members[trainer]
        return self._changed()

    def rejoin(self, trainers: Iterable[str] | None = None) -> list[Effect]:
        """Propose members (all if None) again with new ids and a common first round: pservers loaded a checkpoint."""
        chosen = [self._members[name] for name in (self._members if trainers is None else trainers)]
        if not chosen:
            return []
        self._begin()
        for member in chosen:
            self._propose(member.trainer, member.generation, refusals=0)
        return self._changed()

    def switch(self, mode: Mode) -> list[Effect]:
        """Change the mode at a round on which all pservers must agree. Replaces any pending change."""
        if mode == self._mode:
            return []
        self._mode = mode
        self._switch_refusals = 0
        return self._propose_switch()

    def _propose_switch(self) -> list[Effect]:
        self._begin()
        self._is_switched = False
        self._switch_serial = self._serial
        self._switch_round = max(self._switch_round, self._first_round(self._switch_refusals))
        for member in tuple(self._members.values()):
            self._propose(member.trainer, member.generation, refusals=0)
        return self._changed()

    def note_round(self, trainer: str, round_: int) -> None:
        """Record the round that a trainer reports in sync mode. Does nothing if the trainer is not a member."""
        if isinstance(self._mode, Sync) and self.member_id_of(trainer) is not None:
            self._reported_round = max(self._reported_round, min(round_, self._answered_round + _BELIEVED_ROUNDS))

    # pservers

    def pserver_up(self, index: int, generation: int, highest_open_round: int) -> list[Effect]:
        """Record that a pserver has started or become reachable again. The newest view is sent to it.

        Raises:
            FencedError: a newer process has this index.
        """
        known = self._pservers.get(index)
        if known is not None and generation < known.generation:
            raise FencedError(f"pserver {index} of generation {generation} was replaced by {known.generation}")
        if known is not None and generation == known.generation:
            known.is_up = True
            known.sending = None
            known.highest_open_round = max(known.highest_open_round, highest_open_round)
            return self._settle([])
        self._pservers[index] = _Pserver(generation, highest_open_round, is_up=True)
        # The reported round may have been lost together with the old process.
        self._reported_round = 0
        effects: list[Effect] = [Persist()]
        if known is not None and not isinstance(self._mode, Async) and self._members:
            effects = self.rejoin()
        return effects + [e for e in self._settle([]) if e not in effects]

    def pserver_down(self, index: int) -> list[Effect]:
        """Record that a pserver is unreachable or its lease has ended. Joins wait until it or a successor is up."""
        if (pserver := self._pservers.get(index)) is not None:
            pserver.is_up = False
            pserver.sending = None
        return []

    def answered(
        self,
        index: int,
        generation: int,
        serial: int,
        refused: Sequence[int],
        highest_open_round: int,
        *,
        refuses_mode: bool = False,
    ) -> list[Effect]:
        """Handle a pserver's answer. The pserver has adopted a view, except for any members or mode that it refused."""
        pserver = self._pservers.get(index)
        if pserver is None or pserver.generation != generation or serial > self._serial:
            return []
        if pserver.sending == serial:
            pserver.sending = None
        pserver.answered_serial = max(pserver.answered_serial, serial)
        pserver.highest_open_round = max(pserver.highest_open_round, highest_open_round)
        if refuses_mode and serial >= self._switch_serial:
            self._switch_refusals += 1
            return self._propose_switch()
        lost = [member for member in self._members.values() if member.member_id in refused]
        if not lost:
            return self._settle([])
        self._begin()
        for member in lost:
            refusals = max(member.refusals + 1, self._usual_refusals)
            self._propose(member.trainer, member.generation, refusals=refusals)
        return self._changed()

    def send_failed(self, index: int, generation: int, serial: int) -> list[Effect]:
        """Record that a view could not be sent, and send the newest view. The caller pauses between failures."""
        pserver = self._pservers.get(index)
        if pserver is None or pserver.generation != generation or pserver.sending != serial:
            return []
        pserver.sending = None
        return self._settle([])

    # new views

    def _begin(self) -> None:
        self._serial += 1

    def _propose(self, trainer: str, generation: int, refusals: int, margin: int = 0) -> None:
        self._counter += 1
        if self._counter >> _COUNTER_BITS:
            raise JobFailedError("this master has used up its member ids: restart it")
        member_id = self._master_generation << _COUNTER_BITS | self._counter
        first_round = max(self._switch_round, self._first_round(refusals) + margin)
        self._members[trainer] = Member(trainer, generation, member_id, first_round, self._serial, refusals=refusals)

    def _first_round(self, refusals: int) -> int:
        """Return the highest known open round, plus a margin that doubles with each refusal."""
        margin = min(1 << refusals, 2 * _MARGIN_LIMIT) // 2
        return max(self._answered_round, self._reported_round) + margin

    @property
    def _answered_round(self) -> int:
        return max((p.highest_open_round for p in self._pservers.values()), default=0)

    def _changed(self) -> list[Effect]:
        return self._settle([Persist()])

    def _settle(self, effects: list[Effect]) -> list[Effect]:
        """Admit the members on which all pservers agree, and send the newest view to pservers that do not have it."""
        if not self._is_switched and not self.late_to_switch:
            self._is_switched = True
            self._switch_refusals = 0
        agreed = [
            member
            for member in self._members.values()
            if not member.is_admitted and all(self._has_answered(i, member.serial) for i in range(self._pserver_count))
        ]
        for member in agreed:
            if member.refusals:
                # The next member tries a smaller margin, because too large a margin makes a member wait.
                usual = member.refusals - (member.refusals == self._usual_refusals)
                self._usual_refusals = min(usual, _USUAL_REFUSALS_LIMIT)
        admitted = [replace(member, is_admitted=True, refusals=0) for member in agreed]
        self._members.update((member.trainer, member) for member in admitted)
        if admitted and not effects:
            effects.append(Persist())
        view = self.view
        for index, pserver in sorted(self._pservers.items()):
            if pserver.is_up and pserver.sending is None and pserver.answered_serial < self._serial:
                pserver.sending = self._serial
                effects.append(SendView(index, pserver.generation, view))
        effects.extend(Admitted(member.trainer, member.member_id) for member in admitted)
        return effects

    def _has_answered(self, index: int, serial: int) -> bool:
        pserver = self._pservers.get(index)
        return pserver is not None and pserver.answered_serial >= serial

    # storage

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(
            _Record(
                _FORMAT,
                self._master_generation,
                [
                    _MemberRecord(m.trainer, m.generation, m.member_id, m.first_round, m.is_admitted)
                    for m in self._members.values()
                ],
                [(i, p.generation, p.highest_open_round) for i, p in sorted(self._pservers.items())],
                self._mode.to_json(),
                self._switch_round,
            )
        )

    @classmethod
    def restore(cls, encoded: bytes, master_generation: int, pserver_count: int, *, mode: Mode = _SYNC) -> Membership:
        """Restore the state of a previous master. Every pserver must then be announced by ``pserver_up``.

        ``mode`` applies if the stored state does not contain a mode.

        Raises:
            CorruptError: ``encoded`` is not an output of ``encode``.
            FencedError: a newer master, or this one, stored the state.
        """
        try:
            record = from_msgpack(encoded, _Record)
            stored = mode if record.mode is None else Mode.from_json(record.mode)
        except (msgspec.DecodeError, UsageError) as error:
            raise CorruptError(f"not a stored membership: {str(error)[:200]}") from None
        if record.format != _FORMAT:
            raise CorruptError(f"a membership has format {record.format}, but this version reads format {_FORMAT}")
        if record.master_generation >= master_generation:
            raise FencedError(f"master {master_generation} is older than the stored {record.master_generation}")
        result = cls(master_generation, pserver_count, mode=stored)
        result._switch_round = record.switch_round
        for m in record.members:
            result._members[m.trainer] = Member(
                m.trainer, m.generation, m.member_id, m.first_round, 1, is_admitted=m.is_admitted
            )
        for index, generation, highest in record.pservers:
            if index < pserver_count:
                result._pservers[index] = _Pserver(generation, highest)
        return result

    def check(self) -> None:
        ids = [member.member_id for member in self._members.values()]
        assert len(ids) == len(set(ids)), "two members have the same id"
        assert all(0 < member_id < 1 << 63 for member_id in ids), "a member id is not an int64"
        assert all(name == member.trainer for name, member in self._members.items()), "a member has another name"
        for pserver in self._pservers.values():
            assert pserver.answered_serial <= self._serial, "a view was answered that was never sent"
            assert pserver.sending is None or pserver.is_up, "a view is in flight to an unreachable pserver"
            if pserver.is_up:
                assert pserver.sending is not None or pserver.answered_serial == self._serial, (
                    "a pserver lacks the view"
                )
        for member in self._members.values():
            everywhere = all(self._has_answered(i, member.serial) for i in range(self._pserver_count))
            assert member.is_admitted or not everywhere, "a member is not admitted although all pservers agreed"
