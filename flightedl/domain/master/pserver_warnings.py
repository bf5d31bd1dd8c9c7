"""Warnings from the status of pservers: rounds that wait too long, and calls that are rejected unexpectedly.

Warnings are only logged. A waiting round is logged when it is noticed, and again when the wait ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flightedl.domain.master.effects import Kind, Outbox, pserver_named
from flightedl.messages.status import USUAL_REFUSALS, PserverStatusReply

#: Seconds of waiting after which a round is logged.
SLOW_S = 10.0
#: Minimum number of seconds between two warnings about rejected calls of the same kind.
_REFUSALS_EVERY_S = 60.0


class PserverWarnings:
    """State of the warnings."""

    def __init__(self) -> None:
        #: Names of the trainers for which the logged rounds are waiting.
        self._awaited: list[str] = []
        #: (pserver index, error code) -> (number of rejected calls at the last check, time of the last warning).
        self._refused: dict[tuple[int, str], tuple[int, float]] = {}

    def update(
        self, replies: Sequence[PserverStatusReply | None], trainers: Mapping[int, str], now: float, outbox: Outbox
    ) -> None:
        """Check the latest replies of the pservers, by index, and add warnings to ``outbox``.

        A reply is None if its pserver is unreachable. ``trainers`` maps member ids to trainers' names.
        """
        self._check_rounds(replies, trainers, outbox)
        for index, reply in enumerate(replies):
            if reply is not None:
                self._check_refusals(index, reply, now, outbox)

    def _check_rounds(
        self, replies: Sequence[PserverStatusReply | None], trainers: Mapping[int, str], outbox: Outbox
    ) -> None:
        waiting = {i: each for i, each in enumerate(replies) if each is not None and each.waits_s >= SLOW_S}
        members = {member for each in waiting.values() for member in each.waits_for}
        awaited = sorted(trainers[member] for member in members if member in trainers)
        if awaited == self._awaited:
            return
        if gone := [name for name in self._awaited if name not in awaited]:
            outbox.note(Kind.ROUND_GOES_ON, gone[0], "rounds no longer wait trainers=%s", ", ".join(gone))
        if new := [name for name in awaited if name not in self._awaited]:
            index, longest = max(waiting.items(), key=lambda item: item[1].waits_s)
            outbox.note(
                Kind.ROUND_WAITS,
                new[0],
                "a round is waiting trainers=%s pserver=%d version=%d seconds=%d",
                ", ".join(new),
                index,
                longest.waits_at,
                longest.waits_s,
                is_warning=True,
            )
        self._awaited = awaited

    def _check_refusals(self, index: int, reply: PserverStatusReply, now: float, outbox: Outbox) -> None:
        for code, count in reply.refused_calls.items():
            if code in USUAL_REFUSALS:
                continue
            known, warned_at = self._refused.get((index, code), (0, now - _REFUSALS_EVERY_S))
            if count < known:
                # The pserver has restarted, so its counters start at zero again.
                known = 0
            if count > known and now - warned_at >= _REFUSALS_EVERY_S:
                text = "pserver refuses calls index=%d code=%s calls=%d"
                outbox.note(Kind.CALLS_REFUSED, pserver_named(index), text, index, code, count - known, is_warning=True)
                self._refused[index, code] = (count, now)
