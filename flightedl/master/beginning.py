"""Carries out that the model gets first values again, after all was lost (``domain.recovery.reinitialization``)."""

from __future__ import annotations

import logging

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.recovery.reinitialization import Reinitialize
from flightedl.ports import CreatedAt, Delete

_log = logging.getLogger(__name__)

#: Of one transaction, beside the fence.
_CONDITIONS_LIMIT = 120


def delete_election(held: HeldKey, keys: JobKeys, step: Reinitialize) -> None:
    """Let the trainers elect again; repeated until what the pservers say has changed.

    Raises:
        FencedError: another master leads.
        UnavailableError, OutcomeUnknownError: etcd cannot be written at the moment.
    """
    conditions = [CreatedAt(keys.pserver(index), each) for index, each in step.generations.items()]
    result = held.write(
        [Delete(keys.init_params)],
        [CreatedAt(keys.init_params, step.election), *conditions[:_CONDITIONS_LIMIT]],
    )
    if result.committed:
        _log.warning("the model begins anew: its values were lost, and all tasks are done again")
