"""The master's side of a cut that is made on request: the round at which all pservers cut their blocks.

In modes without rounds, each pserver cuts its blocks at once, so the blocks of a cut have different versions. In sync
mode, all blocks are cut at the same round. The first proposal is round 0, so that each pserver that has passed it
refuses and reports its highest open round. The highest of these is proposed next, which succeeds while training pauses.
If a pserver has passed it, later rounds are proposed, further ahead each time. If training pauses before the proposed
round, the search begins again.
"""

from __future__ import annotations

from collections.abc import Sequence

from flightedl.messages.control import CutRequest, OrderNumber, SnapshotReply

#: Seconds after which an agreed round that has not been reached is given up.
_PATIENCE_S = 1.0


class CutAgreement:
    """State machine of one cut. Not thread-safe.

    Args:
        pservers: Indices of all pservers.
        generation: Generation of the master.
        number: Number of the cut, higher than those of the master's earlier cuts.
        plan_hash: Hash of the shard plan.
        now: The time.
        has_rounds: True in sync mode.
    """

    def __init__(
        self, pservers: Sequence[int], generation: int, number: int, plan_hash: str, now: float, *, has_rounds: bool
    ) -> None:
        self._pservers = list(pservers)
        self._order = OrderNumber(generation, number, 0)
        self._plan_hash = plan_hash
        self._margin = 0
        self._highest = 0
        self._round = 0 if has_rounds else None
        self._since_s = now
        #: Pserver -> state of its answer to the newest proposal.
        self._states: dict[int, str] = {}
        #: Reason why the cut failed; empty if it has not.
        self.trouble = ""

    @property
    def is_complete(self) -> bool:
        return all(self._states.get(index) == "taken" for index in self._pservers)

    def request(self, index: int) -> CutRequest | None:
        """Return the request to send to a pserver, also to ask for its progress; None if it has made the cut."""
        if self._states.get(index) == "taken":
            return None
        return CutRequest(self._order, self._round, plan_hash=self._plan_hash)

    def answered(self, index: int, reply: SnapshotReply, now: float) -> None:
        """Handle a pserver's reply; replies to earlier proposals are ignored."""
        if reply.order != self._order:
            return
        self._states[index] = reply.state
        self._highest = max(self._highest, reply.highest_open_round)
        if reply.state == "failed":
            self.trouble = f"pserver {index} could not make the cut: {reply.reason}"
        if len(self._states) < len(self._pservers):
            return
        if "refused" in self._states.values():
            self._propose(self._highest + self._margin, now)
            self._margin = max(1, 2 * self._margin)
        elif self._round is not None and not self.is_complete and now - self._since_s > _PATIENCE_S:
            self._margin = 0
            self._propose(0, now)

    def _propose(self, at_round: int, now: float) -> None:
        order = self._order
        self._order = OrderNumber(order.master_generation, order.number, order.serial + 1)
        self._round, self._since_s = at_round, now
        self._states.clear()
