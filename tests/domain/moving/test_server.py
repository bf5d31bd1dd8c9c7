"""Units of several blocks: they are copied, frozen, adopted and released together."""

import pytest

from flightedl.domain.moving.server import MovingBlocks, Serves, State, is_surplus
from flightedl.domain.moving.values import (
    NONE,
    Acknowledged,
    Adopt,
    Copy,
    End,
    Intent,
    Last,
    Move,
    Release,
    Stage,
    StoredIntent,
    Thaw,
)
from flightedl.messages.declarations import Placement

SOURCE, DESTINATION, ATTEMPT = 11, 12, 20
PLACEMENT = Placement(version=1, pservers=2, blocks=((0, 6),))
UNITS = (Move(1, 0, 1, 3), Move(5, 0, 1))


def both() -> tuple[MovingBlocks, MovingBlocks]:
    """Return two pservers, of which the first has all blocks, after they have read an intent that moves two units."""
    cores = MovingBlocks(0, SOURCE, State((0, 1, 2, 3, 4, 5))), MovingBlocks(1, DESTINATION, State(()))
    stored = StoredIntent(ATTEMPT, Intent(1, UNITS, ((0, SOURCE), (1, DESTINATION))))
    assert cores[0].read(ATTEMPT, PLACEMENT, stored, SOURCE) == [
        Copy(ATTEMPT, 1, DESTINATION, 3),
        Copy(ATTEMPT, 5, DESTINATION),
    ]
    assert cores[1].read(ATTEMPT, PLACEMENT, stored, DESTINATION) == []
    return cores


def test_a_unit_is_frozen_adopted_and_released_as_a_whole() -> None:
    source, target = both()
    assert target.received(Copy(ATTEMPT, 1, DESTINATION, 3)) == Stage(1)
    last = source.freeze(1, b"content")
    assert last == Last(ATTEMPT, 1, DESTINATION, 0, b"content")
    assert [source.serves(block) for block in range(6)] == [
        Serves.HERE,
        *[Serves.FROZEN] * 3,
        *[Serves.HERE] * 2,
    ]
    assert target.received(last, b"content") == Acknowledged(ATTEMPT, 1)
    placement = PLACEMENT.moved([(UNITS[0].blocks, 1)], ATTEMPT)
    assert placement.owners == (0, 1, 1, 1, 0, 0)
    assert [placement.attempt_of(block) for block in range(6)] == [NONE, *[ATTEMPT] * 3, NONE, NONE]
    rest = StoredIntent(ATTEMPT, Intent(1, UNITS[1:], ((0, SOURCE), (1, DESTINATION))))
    assert source.read(21, placement, rest, SOURCE) == [Release(1, 3)]
    assert target.read(21, placement, rest, DESTINATION) == [Adopt(1)]
    assert (source.state.blocks, target.state.blocks) == ((0, 4, 5), (1, 2, 3))
    assert [each.block for each in source.state.leaving] == [5]


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_process_that_lacks_a_part_of_its_blocks_ends(is_complete: bool) -> None:
    _, target = both()
    target.received(Copy(ATTEMPT, 1, DESTINATION, 3))
    if is_complete:
        target.received(Last(ATTEMPT, 1, DESTINATION, 0, b""))
    placement = PLACEMENT.moved([(range(1, 5), 1)], ATTEMPT)
    assert target.read(21, placement, None, DESTINATION) == [*[Adopt(1)] * is_complete, End()]


def test_the_content_of_an_earlier_attempt_is_not_adopted() -> None:
    _, target = both()
    target.received(Copy(ATTEMPT, 1, DESTINATION, 3))
    target.received(Last(ATTEMPT, 1, DESTINATION, 0, b""))
    placement = PLACEMENT.moved([(UNITS[0].blocks, 1)], ATTEMPT + 1)
    found = target.read(22, placement, None, DESTINATION)
    assert Adopt(1) not in found
    assert found[-1] == End()


@pytest.mark.parametrize(
    ("index", "desired", "is_serving", "is_last"),
    [(1, 1, True, False), (2, 3, True, True), (2, 3, False, False), (2, 2, False, True), (2, None, False, False)],
)
def test_a_process_ends_if_its_pserver_has_left_or_is_not_added(
    index: int, desired: int | None, is_serving: bool, is_last: bool
) -> None:
    assert is_surplus(index, PLACEMENT, desired, is_serving=is_serving) is is_last


def test_a_process_ends_if_etcd_has_lost_its_placement() -> None:
    source, _ = both()
    newer = PLACEMENT.resized(3)
    assert source.read(21, newer, None, SOURCE) == [Thaw(1), Thaw(5)]
    assert source.read(22, PLACEMENT, None, SOURCE) == [End()]
