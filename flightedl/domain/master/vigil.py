"""What pservers say of themselves, watched: who is waited for too long, and calls that ought not to be refused.

It decides nothing: what it finds is told, once when it begins and once when it is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flightedl.domain.master.effects import Kind, Outbox, pserver_named
from flightedl.messages.status import USUAL_REFUSALS, PserverStatusReply

#: A round that waits longer for the same members is told of.
SLOW_S = 10.0
#: The same refusals are told of once in this time.
_REFUSALS_EVERY_S = 60.0


class Vigil:
    """Watches over pservers' words."""

    def __init__(self) -> None:
        #: Whom a round that was told of waits for, by name.
        self._awaited: list[str] = []
        #: (pserver index, error code) -> how many calls there were, and when that was told.
        self._refused: dict[tuple[int, str], tuple[int, float]] = {}

    def look(
        self, replies: Sequence[PserverStatusReply | None], trainers: Mapping[int, str], now: float, outbox: Outbox
    ) -> None:
        """Look at the pservers' last replies, by index. None: there is no reply; ``trainers``: members by number."""
        self._look_at_rounds(replies, trainers, outbox)
        for index, reply in enumerate(replies):
            if reply is not None:
                self._look_at_refusals(index, reply, now, outbox)

    def _look_at_rounds(
        self, replies: Sequence[PserverStatusReply | None], trainers: Mapping[int, str], outbox: Outbox
    ) -> None:
        waiting = {i: each for i, each in enumerate(replies) if each is not None and each.waits_s >= SLOW_S}
        members = {member for each in waiting.values() for member in each.waits_for}
        awaited = sorted(trainers[member] for member in members if member in trainers)
        if awaited == self._awaited:
            return
        if gone := [name for name in self._awaited if name not in awaited]:
            outbox.note(Kind.ROUND_GOES_ON, gone[0], "rounds go on that waited trainers=%s", ", ".join(gone))
        if new := [name for name in awaited if name not in self._awaited]:
            index, longest = max(waiting.items(), key=lambda item: item[1].waits_s)
            outbox.note(
                Kind.ROUND_WAITS,
                new[0],
                "a round waits trainers=%s pserver=%d version=%d seconds=%d",
                ", ".join(new),
                index,
                longest.waits_at,
                longest.waits_s,
                is_warning=True,
            )
        self._awaited = awaited

    def _look_at_refusals(self, index: int, reply: PserverStatusReply, now: float, outbox: Outbox) -> None:
        for code, count in reply.refused_calls.items():
            if code in USUAL_REFUSALS:
                continue
            known, told_at = self._refused.get((index, code), (0, now - _REFUSALS_EVERY_S))
            if count < known:
                # Another process, which has counted from 0.
                known = 0
            if count > known and now - told_at >= _REFUSALS_EVERY_S:
                text = "pserver refuses calls index=%d code=%s calls=%d"
                outbox.note(Kind.CALLS_REFUSED, pserver_named(index), text, index, code, count - known, is_warning=True)
                self._refused[index, code] = (count, now)
