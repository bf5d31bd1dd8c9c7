"""What the master remembers of pservers that lack their values."""

from __future__ import annotations

from typing import cast

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.beginnings import BeginAnew
from flightedl.master.beginning import Beginning


def beginning() -> Beginning:
    return Beginning(2, cast("HeldKey", None), JobKeys("job"))


def test_who_has_values_ends_and_then_the_election_does() -> None:
    known = beginning()
    known.said(0, 7, election=3)
    assert known.next_step({0: 7, 1: 5}, {0: 4, 1: 5}, may_be_saved=False) is None
    assert (known.must_end(0), known.must_end(1)) == (None, 5)
    assert "pserver 0" in known.waiting_for
    known.said(1, 9, election=3)
    assert known.next_step({0: 7, 1: 9}, {0: 4, 1: 5}, may_be_saved=False) == BeginAnew(3, {0: 7, 1: 9})
    assert known.must_end(1) is None


def test_nobody_ends_when_a_checkpoint_turned_up() -> None:
    known = beginning()
    known.said(0, 7, election=3)
    known.next_step({0: 7, 1: 5}, {1: 5}, may_be_saved=False)
    known.said(0, 7, election=None)
    assert known.must_end(1) is None
    assert not known.waiting_for


def test_what_a_process_said_is_forgotten_with_it() -> None:
    known = beginning()
    known.said(0, 7, election=3)
    known.next_step({0: 8, 1: 5}, {1: 5}, may_be_saved=False)
    assert not known.waiting_for
