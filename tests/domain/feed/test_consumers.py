"""Acknowledgements of named consumers: only what a consumer has applied counts, and nothing goes back."""

from __future__ import annotations

import pytest

from flightedl.domain.feed.consumers import Consumers, may_replace
from flightedl.domain.feed.server import ServerFeed, State
from flightedl.messages.feed import Acknowledgement, Position


def at(number: int, generation: int = 5, life: int = 3) -> Position:
    return Position(life=life, generation=generation, placement=0, number=number)


def stored(number: int, generation: int = 5, behind: int = 0, as_of_s: float = 0.0) -> Acknowledgement:
    return Acknowledgement(position=at(number, generation), behind=behind, as_of_s=as_of_s)


@pytest.fixture
def consumers() -> Consumers:
    return Consumers()


def test_what_was_only_sent_is_not_acknowledged(consumers: Consumers) -> None:
    consumers.answered("serving", 7, 4, 100.0)
    assert consumers.take({"serving": 7}) == {}


def test_the_next_request_acknowledges_the_state_that_was_sent(consumers: Consumers) -> None:
    consumers.answered("serving", 7, 4, 100.0)
    consumers.acknowledged("serving", 7, at(4), 6)
    assert consumers.take({"serving": 7}) == {"serving": stored(4, behind=2, as_of_s=100.0)}
    assert consumers.take({"serving": 7}) == {}


def test_a_consumer_with_the_newest_state_stays_up_to_date(consumers: Consumers) -> None:
    consumers.answered("serving", 7, 4, 100.0)
    consumers.acknowledged("serving", 7, at(4), 4)
    consumers.answered("serving", 7, 4, 101.0)
    assert consumers.take({"serving": 7}) == {"serving": stored(4, as_of_s=101.0)}


def test_a_consumer_that_lost_an_answer_keeps_the_time_of_its_older_state(consumers: Consumers) -> None:
    consumers.answered("serving", 7, 4, 100.0)
    consumers.acknowledged("serving", 7, at(4), 4)
    consumers.answered("serving", 7, 5, 110.0)
    consumers.acknowledged("serving", 7, at(4), 5)
    assert consumers.take({"serving": 7}) == {"serving": stored(4, behind=1, as_of_s=100.0)}


def test_an_older_request_that_arrives_late_changes_nothing(consumers: Consumers) -> None:
    consumers.answered("serving", 7, 9, 100.0)
    consumers.acknowledged("serving", 7, at(9), 9)
    consumers.acknowledged("serving", 7, at(4), 9)
    assert consumers.take({"serving": 7})["serving"].position == at(9)


def test_a_new_holder_of_a_name_starts_over_and_the_former_one_is_ignored(consumers: Consumers) -> None:
    consumers.answered("serving", 7, 9, 100.0)
    consumers.acknowledged("serving", 7, at(9), 9)
    consumers.answered("serving", 8, 3, 101.0)
    consumers.acknowledged("serving", 8, at(3), 9)
    consumers.acknowledged("serving", 7, at(9), 9)
    consumers.answered("serving", 7, 9, 102.0)
    assert consumers.take({"serving": 8}) == {"serving": stored(3, behind=6, as_of_s=101.0)}


@pytest.mark.parametrize("holders", [{}, {"serving": 8}, {"other": 7}], ids=["nobody", "another process", "others"])
def test_a_consumer_that_no_longer_holds_its_name_is_forgotten(consumers: Consumers, holders: dict[str, int]) -> None:
    consumers.acknowledged("serving", 7, at(9), 9)
    assert consumers.take(holders) == {}
    assert set(consumers.known) <= set(holders)


@pytest.mark.parametrize(
    ("position", "may"),
    [
        (at(5), True),
        (at(6), True),
        (at(4), False),
        (at(1, generation=6), True),
        (at(9, generation=4), False),
    ],
    ids=["the same", "newer", "older", "of the pserver's next process", "of the pserver's former process"],
)
def test_a_stored_position_is_replaced_only_by_one_that_is_not_older(position: Position, may: bool) -> None:
    assert may_replace(stored(5), position) == may
    assert may_replace(None, position)


def test_only_positions_in_a_feed_can_be_acknowledged() -> None:
    feed = ServerFeed(life=3, generation=5)
    feed.note({0: State(0, 1)})
    assert feed.has(at(1))
    assert not feed.has(None)
    for foreign in (at(2), at(1, generation=4), at(1, life=2)):
        assert not feed.has(foreign)
