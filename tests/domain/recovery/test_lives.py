"""Names and the lives of a model to which they belong."""

from __future__ import annotations

import pytest

from flightedl.domain.recovery.lives import PresentLife, name_in
from flightedl.errors import BegunAnewError


def test_a_later_life_forgets_the_names_of_the_previous_one() -> None:
    present = PresentLife()
    assert not present.enter(7), "the known names have an unknown life, so they belong to this one"
    assert not present.enter(7)
    assert not present.enter(0), "a trainer without a model accepts any life"
    assert present.enter(9)
    with pytest.raises(BegunAnewError):
        present.enter(7)


def test_the_second_life_follows_the_first_one() -> None:
    assert PresentLife(1).enter(2)


def test_a_life_ends_before_the_next_one_has_a_number() -> None:
    present = PresentLife(7)
    present.end(7)
    with pytest.raises(BegunAnewError):
        present.enter(7)
    assert present.enter(9)
    present.end(7)
    assert not present.enter(9), "that life ended long ago"


def test_names_of_different_lives_differ() -> None:
    assert len({name_in(0, "a"), name_in(1, "a"), name_in(2, "a")}) == 3
