"""Reinitialization of a model whose values have been lost (``domain.recovery.reinitialization``)."""

from __future__ import annotations

import logging

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.recovery.reinitialization import Reinitialize
from flightedl.ports import CreatedAt, Delete

_log = logging.getLogger(__name__)

#: Maximum number of conditions in a transaction, in addition to the fence.
_CONDITIONS_LIMIT = 120


def delete_election(held: HeldKey, keys: JobKeys, step: Reinitialize) -> None:
    """Delete the election, so that trainers hold a new one. Repeat this until the pservers' answers change.

    Raises:
        FencedError: another master holds the lock.
        UnavailableError, OutcomeUnknownError: etcd temporarily cannot be written.
    """
    conditions = [CreatedAt(keys.pserver(index), each) for index, each in step.generations.items()]
    result = held.write(
        [Delete(keys.init_params)],
        [CreatedAt(keys.init_params, step.election), *conditions[:_CONDITIONS_LIMIT]],
    )
    if result.committed:
        _log.warning("the model's values were lost: it is initialized again, and all tasks are repeated")
