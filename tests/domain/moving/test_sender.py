"""A unit that leaves is copied, frozen and acknowledged, or given up when this takes too long."""

from __future__ import annotations

import pytest

from flightedl.domain.moving.sender import Do, Step, UnitSender


class Sending:
    """A sender, and the time."""

    def __init__(self) -> None:
        self.core, self.now = UnitSender(), 100.0
        self.core.begin(self.now)

    def next_step(self, *, is_leaving: bool = True, changed_rows: int = 0) -> Do:
        """Return the next step after the time for which the core waits."""
        step = self.core.next_step(self.now, is_leaving=is_leaving, changed_rows=changed_rows)
        if step.do is Do.WAIT:
            self.now = step.until
            step = self.core.next_step(self.now, is_leaving=is_leaving, changed_rows=changed_rows)
        return step.do

    def do(self, *steps: Do, changed_rows: int = 0) -> None:
        for step in steps:
            assert self.next_step(changed_rows=changed_rows) is step
            self.core.done(self.now)


@pytest.fixture
def sending() -> Sending:
    return Sending()


def test_a_unit_is_frozen_once_few_rows_are_left(sending: Sending) -> None:
    sending.do(Do.COPY)
    sending.do(Do.UPDATE, Do.UPDATE, changed_rows=1_000_000)
    sending.do(Do.FREEZE, Do.REST, Do.LAST, changed_rows=10)
    assert sending.core.next_step(sending.now, is_leaving=True).do is Do.WAIT
    assert sending.core.next_step(sending.now, is_leaving=False) == Step(Do.END)


def test_a_unit_whose_rows_change_all_the_time_is_frozen_all_the_same(sending: Sending) -> None:
    sending.do(Do.COPY, *[Do.UPDATE] * 8, Do.FREEZE, changed_rows=1_000_000)


def test_a_unit_within_a_round_is_not_frozen(sending: Sending) -> None:
    sending.do(Do.COPY)
    assert [sending.next_step() for _ in range(3)] == [Do.FREEZE] * 3


def test_an_attempt_that_is_not_committed_is_given_up_later_each_time(sending: Sending) -> None:
    waits_s = []
    for _ in range(7):
        sending.do(Do.COPY, Do.FREEZE, Do.REST, Do.LAST)
        before = sending.now
        assert sending.next_step() is Do.GIVE_UP
        waits_s.append(round(sending.now - before, 6))
        sending.core.done(sending.now)
        assert sending.next_step(is_leaving=False) is Do.END
        sending.core.begin(sending.now)
    assert waits_s == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    sending.do(Do.COPY, Do.FREEZE, Do.REST, Do.LAST)
    assert sending.core.next_step(sending.now, is_leaving=False) == Step(Do.END)
    sending.core.begin(sending.now)
    sending.do(Do.COPY, Do.FREEZE, Do.REST, Do.LAST)
    assert sending.core.next_step(sending.now, is_leaving=True).until == pytest.approx(sending.now + 0.2)


def test_giving_up_is_repeated_until_etcd_confirms_it(sending: Sending) -> None:
    sending.do(Do.COPY, Do.FREEZE, Do.REST, Do.LAST, Do.GIVE_UP, Do.GIVE_UP)
    assert sending.next_step(is_leaving=False) is Do.END


def test_a_refused_acknowledgement_is_requested_again_for_a_short_time(sending: Sending) -> None:
    sending.do(Do.COPY, Do.FREEZE, Do.REST)
    assert sending.next_step() is Do.LAST
    assert not sending.core.failed(sending.now, may_repeat=True)
    assert sending.next_step() is Do.LAST
    sending.now += 1.0
    assert sending.core.failed(sending.now, may_repeat=True)
    assert sending.next_step() is Do.GIVE_UP


@pytest.mark.parametrize("steps", [[], [Do.COPY, Do.FREEZE], [Do.COPY, Do.FREEZE, Do.REST]])
def test_an_attempt_whose_upload_fails_is_given_up(sending: Sending, steps: list[Do]) -> None:
    sending.do(*steps)
    sending.next_step()
    assert sending.core.failed(sending.now, may_repeat=False)
    assert sending.next_step() is Do.GIVE_UP


def test_pushes_continue_for_a_while_before_the_next_unit_is_frozen(sending: Sending) -> None:
    sending.do(Do.COPY, Do.FREEZE)
    sending.now += 0.1
    assert sending.core.next_step(sending.now, is_leaving=False) == Step(Do.END)
    sending.core.begin(sending.now)
    sending.do(Do.COPY)
    assert sending.core.next_step(sending.now, is_leaving=True) == Step(Do.WAIT, pytest.approx(sending.now + 0.2))
