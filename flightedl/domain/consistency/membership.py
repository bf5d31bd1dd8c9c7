"""The view: which trainers a round waits for, agreed between the master and all pservers.

This is the master's side: events in, effects out. A pserver's side is ``views.PserverView``.

* A view is full state, numbered (master generation, serial). A pserver takes only one that is newer than the one it
  has, so a deposed master's view changes nothing once its successor's has come, and lost or late views do no harm.
* *Leaving* takes effect as the new view reaches each pserver; it needs no agreement. Removing a member is always safe.
* *Joining* needs agreement on the first round that waits for the member: it has to be the same on all blocks, or the
  member would be waited for on one block while it waits for another. The master proposes the highest open round that it
  knows of. A pserver admits a new member exactly if none of its blocks' open rounds is above its first round. When all
  have, the member is *admitted*, and only then its trainer is told the member id. When one refused, the trainer is
  proposed anew under a new id, at the highest open round answered plus a margin that doubles with each refusal. The
  first margin is none, and after a refusal that which was enough for others before, or half of it, two rounds at most:
  how many are closed while a view travels depends on how long they take. Members say which round they are at, and that
  counts as an open round that is known of, up to so many rounds beyond what pservers have said.
* A *member id* is given once: (master generation, counter) in one int64. What was sent under an old id is refused, so
  forgetting a member and proposing its trainer anew is always possible. The trainer learns of it when it is refused.
* *A pserver that returns* with a new generation has lost rounds: its blocks start from a checkpoint, behind the others.
  Then every member is proposed anew at the highest open round of all pservers. In that view nobody is due anywhere
  before this round, so blocks that are behind catch up to it without updates (see ``rounds``), and all members start
  there. The batches of the lost rounds are found missing in the applied sets, and dispatched again.
* *A new master* goes on from the stored state with its own generation. Nothing rests on that state being the newest:
  members it does not know are removed and ask again; one that a pserver does not know, and cannot admit any more, is
  proposed anew. A pserver whose generation is not the stored one counts as returned.
* In bounded mode the first round is where a member's clock starts, so the same holds, but pservers admit everybody. In
  async mode a view is only a fence: a pserver that returns gets it as it is.
* *The mode changes* by a view that names another one. In it every member is new and starts at the *switch round*, so
  whatever was pushed before under the old mode is taken before, and nothing is pushed until all pservers have changed.
  A pserver that is past this round removes the old members, admits nobody and refuses; then a later round is proposed
  to all, under new ids. A process that has taken no view yet just begins in the mode of the first one.

One view at a time is on its way to each pserver, always the newest, so that joins and leaves that come together travel
together. The caller reports an answer (``answered``) or that none came (``send_failed``).

Effects are ordered: store the state before sending views, send views before telling trainers. No safety rests on it.

Not guaranteed: that a join ends while a pserver is away, or how fast while rounds close faster than views travel.
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

#: Bits of a member id below the master's generation.
_COUNTER_BITS = 22
_GENERATION_LIMIT = 1 << (63 - _COUNTER_BITS)
#: The margin stops doubling here.
_MARGIN_LIMIT = 1024
_USUAL_REFUSALS_LIMIT = 2
#: A member is believed to be so far beyond the highest open round that a pserver has answered.
_BELIEVED_ROUNDS = 256
_FORMAT = 1
_SYNC = Sync()


@dataclass(slots=True)
class _Pserver:
    generation: int
    highest_open_round: int = 0
    is_up: bool = False
    #: Newest serial it answered; 0: none of this master.
    answered_serial: int = 0
    #: Serial on its way.
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
    """The master's view and how far the pservers have agreed to it.

    Args:
        master_generation: Of this master; higher than every earlier master's.
        pserver_count: Pservers (indexes 0 to ``pserver_count`` - 1) that have to agree to a join.
        mode: The job's.
    """

    def __init__(self, master_generation: int, pserver_count: int, *, mode: Mode = _SYNC) -> None:
        if not 0 <= master_generation < _GENERATION_LIMIT:
            raise JobFailedError(
                f"master generation {master_generation} is too large for member ids: the job was resumed too often; "
                "begin another one with the values of its checkpoint (fe.load)"
            )
        self._master_generation = master_generation
        self._pserver_count = pserver_count
        self._mode = mode
        #: The lowest round that anybody starts at.
        self._switch_round = 0
        #: Serial of the first view of this master that has the present mode.
        self._switch_serial = 1
        self._switch_refusals = 0
        #: The highest round that a member is at, by its own word; 0: not known.
        self._told_round = 0
        #: So many refusals make the margin that is probably enough.
        self._usual_refusals = 0
        #: Whether every pserver has had the present mode.
        self._is_switched = False
        self._counter = 0
        #: Of the newest view; the first one, which all pservers get, is 1.
        self._serial = 1
        self._members: dict[str, Member] = {}
        self._pservers: dict[int, _Pserver] = {}

    @property
    def view(self) -> ViewRequest:
        """The newest view, of no plan yet."""
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
        """Where the present mode began, or begins; 0: with the job."""
        return self._switch_round

    @property
    def late_to_switch(self) -> list[int]:
        """Pservers that have not answered yet that they have the present mode; empty: it is agreed."""
        if self._is_switched:
            return []
        return [i for i in range(self._pserver_count) if not self._has_answered(i, self._switch_serial)]

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    @property
    def is_quiet(self) -> bool:
        """Whether all pservers are up and have answered the newest view."""
        return all(self._has_answered(i, self._serial) and self._pservers[i].is_up for i in range(self._pserver_count))

    def member_id_of(self, trainer: str) -> int | None:
        """The id of an admitted trainer; None: not in the view, or not agreed yet."""
        member = self._members.get(trainer)
        return member.member_id if member is not None and member.is_admitted else None

    def waiting_for(self, trainer: str) -> str:
        """Whose answer the trainer's join waits for, for people; empty when it waits for nothing."""
        member = self._members.get(trainer)
        if member is None or member.is_admitted:
            return ""
        late = [str(i) for i in range(self._pserver_count) if not self._has_answered(i, member.serial)]
        return f"the answer of pserver {', '.join(late)} to round {member.first_round}"

    # trainers

    def join(self, trainer: str, generation: int, margin: int = 0) -> list[Effect]:
        """A trainer that holds work asks to be waited for; asking again changes nothing.

        Args:
            trainer: Its name.
            generation: Of its registration.
            margin: So many rounds behind the highest open one.

        Raises:
            UnregisteredError: a newer registration of this trainer is a member already.
        """
        member = self._members.get(trainer)
        if member is not None and generation < member.generation:
            raise UnregisteredError(f"trainer {trainer} has registered anew since; this process is not it any more")
        if member is not None and generation == member.generation:
            return []
        self._begin()
        self._propose(trainer, generation, refusals=0, margin=margin)
        return self._changed()

    def join_together(self, trainers: Mapping[str, int]) -> list[Effect]:
        """Several trainers (name -> generation) ask at once: those that are no members yet start at one round."""
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
        """A trainer is gone or has no work; with ``generation``, only if that is the member's."""
        member = self._members.get(trainer)
        if member is None or generation not in {None, member.generation}:
            return []
        self._begin()
        del self._members[trainer]
        return self._changed()

    def rejoin(self, trainers: Iterable[str] | None = None) -> list[Effect]:
        """Propose members (None: all) anew under new ids, at one round; their old ids end.

        For pservers that went back to a checkpoint.
        """
        chosen = [self._members[name] for name in (self._members if trainers is None else trainers)]
        if not chosen:
            return []
        self._begin()
        for member in chosen:
            self._propose(member.trainer, member.generation, refusals=0)
        return self._changed()

    def switch(self, mode: Mode) -> list[Effect]:
        """Change the mode, at one round that is agreed with all pservers; overtakes a change that is under way."""
        if mode == self._mode:
            return []
        self._mode = mode
        self._switch_refusals = 0
        return self._propose_switch()

    def _propose_switch(self) -> list[Effect]:
        """Everybody begins anew at the round at which the mode changes."""
        self._begin()
        self._is_switched = False
        self._switch_serial = self._serial
        self._switch_round = max(self._switch_round, self._first_round(self._switch_refusals))
        for member in tuple(self._members.values()):
            self._propose(member.trainer, member.generation, refusals=0)
        return self._changed()

    def note_round(self, trainer: str, round_: int) -> None:
        """A trainer says which synchronous round it is at; what is none of a member is passed over."""
        if isinstance(self._mode, Sync) and self.member_id_of(trainer) is not None:
            self._told_round = max(self._told_round, min(round_, self._answered_round + _BELIEVED_ROUNDS))

    # pservers

    def pserver_up(self, index: int, generation: int, highest_open_round: int) -> list[Effect]:
        """A pserver is there: for the first time, again, or as a new process. It gets the newest view.

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
        # What was told may be of rounds that are lost.
        self._told_round = 0
        effects: list[Effect] = [Persist()]
        if known is not None and not isinstance(self._mode, Async) and self._members:
            effects = self.rejoin()
        return effects + [e for e in self._settle([]) if e not in effects]

    def pserver_down(self, index: int) -> list[Effect]:
        """A pserver cannot be reached or its lease ended; joins wait until it, or its successor, is up."""
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
        """A pserver carried a view of this master out, except for the members, or the mode, that it refused."""
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
        """No answer came; the newest view is sent (the caller waits a little between failures)."""
        pserver = self._pservers.get(index)
        if pserver is None or pserver.generation != generation or pserver.sending != serial:
            return []
        pserver.sending = None
        return self._settle([])

    # how a view comes about

    def _begin(self) -> None:
        self._serial += 1

    def _propose(self, trainer: str, generation: int, refusals: int, margin: int = 0) -> None:
        self._counter += 1
        if self._counter >> _COUNTER_BITS:
            raise JobFailedError("this master has given out all its member ids: restart the master")
        member_id = self._master_generation << _COUNTER_BITS | self._counter
        first_round = max(self._switch_round, self._first_round(refusals) + margin)
        self._members[trainer] = Member(trainer, generation, member_id, first_round, self._serial, refusals=refusals)

    def _first_round(self, refusals: int) -> int:
        """The highest open round that is known of, and a margin that doubles with each refusal."""
        margin = min(1 << refusals, 2 * _MARGIN_LIMIT) // 2
        return max(self._answered_round, self._told_round) + margin

    @property
    def _answered_round(self) -> int:
        return max((p.highest_open_round for p in self._pservers.values()), default=0)

    def _changed(self) -> list[Effect]:
        return self._settle([Persist()])

    def _settle(self, effects: list[Effect]) -> list[Effect]:
        """Admit whom all have answered, send the newest view to whoever lacks it."""
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
                # The next one tries whether less is enough. Who is given more than it needs waits for it, so few.
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
        """Go on from what an earlier master stored; every pserver has to be announced by ``pserver_up``.

        ``mode`` is the job's where none is stored.

        Raises:
            CorruptError: not what ``encode`` writes.
            FencedError: the state is that of a master as new as this one.
        """
        try:
            record = from_msgpack(encoded, _Record)
            stored = mode if record.mode is None else Mode.from_json(record.mode)
        except (msgspec.DecodeError, UsageError) as error:
            raise CorruptError(f"not a stored membership: {str(error)[:200]}") from None
        if record.format != _FORMAT:
            raise CorruptError(f"a membership of format {record.format}; this version reads format {_FORMAT}")
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
        assert len(ids) == len(set(ids)), "two members of one id"
        assert all(0 < member_id < 1 << 63 for member_id in ids), "a member id that is no int64"
        assert all(name == member.trainer for name, member in self._members.items()), "a member of another's name"
        for pserver in self._pservers.values():
            assert pserver.answered_serial <= self._serial, "an answer to a view that was never sent"
            assert pserver.sending is None or pserver.is_up, "a view is on its way to nobody"
            if pserver.is_up:
                assert pserver.sending is not None or pserver.answered_serial == self._serial, (
                    "a pserver lacks the view"
                )
        for member in self._members.values():
            everywhere = all(self._has_answered(i, member.serial) for i in range(self._pserver_count))
            assert member.is_admitted or not everywhere, "a member is agreed but not admitted"
