"""Tests of the moves that a master rejects, and of the intents that it cancels."""

import pytest

from flightedl.domain.moving.director import Director
from flightedl.domain.moving.values import Intent, Move, StoredIntent
from flightedl.errors import NotReadyError, UsageError
from flightedl.messages.declarations import Placement

PLACEMENT = Placement(version=1, pservers=3, blocks=((0, 1), (1, 1)))
SEEN = {0: 2, 1: 3, 2: 4}
INTENT = Intent(1, (Move(0, 0, 2),), ((0, 2), (2, 4)))


def begin(moves, stored=None, seen=SEEN, settled=SEEN, **open_):
    flags = {"is_audit_open": False, "is_checkpoint_open": False} | open_
    return Director(1, PLACEMENT, stored).begin(moves, seen, settled, **flags)


@pytest.mark.parametrize(
    ("moves", "sentence"),
    [
        ([Move(0, 0, 1), Move(0, 0, 2)], "a block cannot move to two pservers"),
        ([Move(0, 1, 2)], "block 0 cannot move from pserver 1 to 2"),
        ([Move(0, 0, 0)], "block 0 cannot move from pserver 0 to 0"),
    ],
)
def test_impossible_moves_are_refused(moves, sentence):
    with pytest.raises(UsageError, match=sentence):
        begin(moves)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"stored": StoredIntent(9, INTENT)}, "other blocks are being moved"),
        ({"seen": {0: 2, 1: 3}}, "there is no pserver 2"),
        ({"settled": {0: 2, 2: 4}}, "a pserver has not reported yet"),
        ({"is_audit_open": True}, "an audit is in progress"),
        ({"is_checkpoint_open": True}, "a checkpoint is in progress"),
    ],
)
def test_moves_wait_for_operations_that_exclude_them(more, sentence):
    with pytest.raises(NotReadyError, match=sentence):
        begin([Move(0, 0, 2)], **more)


def test_an_intent_names_the_generations_and_compares_them():
    transaction = begin([Move(0, 0, 2)])
    assert transaction.intent == INTENT
    assert transaction.generations == ((0, 2), (2, 4))
    assert (transaction.attempt, transaction.master, transaction.version) == (0, 1, 1)
    assert transaction.excludes_checkpoint


def test_intents_of_a_predecessor_and_of_a_departed_pserver_are_cancelled():
    stored = StoredIntent(9, INTENT)
    assert Director(1, PLACEMENT, stored).cancel_if_failed(SEEN) is None
    assert Director(1, PLACEMENT, None).cancel_if_failed({}) is None
    for master, seen in ((5, SEEN), (1, {0: 2, 1: 3}), (1, SEEN | {0: 8})):
        transaction = Director(master, PLACEMENT, stored).cancel_if_failed(seen)
        assert transaction is not None
        assert (transaction.attempt, transaction.intent, transaction.placement) == (9, None, None)
