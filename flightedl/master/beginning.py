"""Giving the model first values anew, after all that it had was lost; see ``domain.beginnings``.

Called under the service's lock, but for ``delete_election``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.beginnings import BeginAnew, Lacking, SendBack, next_step
from flightedl.ports import CreatedAt, Delete

_log = logging.getLogger(__name__)

#: Of one transaction, beside the fence.
_CONDITIONS_LIMIT = 120


class Beginning:
    """What pservers said about values that they lack, and what follows."""

    def __init__(self, pserver_count: int, held: HeldKey, keys: JobKeys) -> None:
        self._pserver_count = pserver_count
        self._held = held
        self._keys = keys
        self._lacking: dict[int, Lacking] = {}
        self._sent_back: Mapping[int, int] = {}

    def said(self, index: int, generation: int, election: int | None) -> None:
        """A pserver lacks the values of an election (None: it lacks nothing)."""
        if election is None:
            self._lacking.pop(index, None)
            if not self._lacking:
                # Its values were in a checkpoint after all, or all have new ones.
                self._sent_back = {}
        else:
            if index not in self._lacking:
                _log.warning("pserver %d has lost its values, and there is no checkpoint yet", index)
            self._lacking[index] = Lacking(generation, election)

    def must_end(self, index: int) -> int | None:
        """The generation that is to end, so that its successor begins without values; None: it may stay."""
        return self._sent_back.get(index)

    @property
    def waiting_for(self) -> str:
        """For people; empty: nothing is lacking."""
        if not self._lacking:
            return ""
        missing = ", ".join(str(index) for index in sorted(self._lacking))
        return f"the model to begin anew: pserver {missing} died before there was a checkpoint"

    def next_step(
        self, present: Mapping[int, int], settled: Mapping[int, int], *, may_be_saved: bool
    ) -> BeginAnew | None:
        """An election to be deleted, when it is time; notes whom to send back."""
        self._lacking = {i: each for i, each in self._lacking.items() if present.get(i) == each.generation}
        step = next_step(self._pserver_count, present, self._lacking, settled, may_be_saved=may_be_saved)
        self._sent_back = step.generations if isinstance(step, SendBack) else {}
        return step if isinstance(step, BeginAnew) else None

    def delete_election(self, step: BeginAnew) -> None:
        """Let the trainers elect again; repeated until what the pservers say has changed.

        Raises:
            FencedError: another master leads.
            UnavailableError, OutcomeUnknownError: etcd cannot be written at the moment.
        """
        conditions = [CreatedAt(self._keys.pserver(index), each) for index, each in step.generations.items()]
        result = self._held.write(
            [Delete(self._keys.init_params)],
            [CreatedAt(self._keys.init_params, step.election), *conditions[:_CONDITIONS_LIMIT]],
        )
        if result.committed:
            _log.warning("the model begins anew: its values were lost, and all tasks are done again")
