"""Views in flight to pservers: each process gets the newest one, however its predecessor ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flightedl.domain.consistency.membership import Membership
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.members import Members
from flightedl.messages.control import ViewReply, ViewRequest

MASTER = 5
OLD, NEW = 10, 20


class Bench:
    """The members of a job with one pserver, whose first process has had the first view, and one trainer."""

    def __init__(self, mode: Mode) -> None:
        self.members = Members(Membership(MASTER, 1, mode=mode), Outbox())
        self.up(OLD)
        self.answer(OLD)
        self.join("t")

    @property
    def membership(self) -> Membership:
        return self.members.membership

    def up(self, generation: int) -> None:
        self.members.pserver_up(0, generation)

    def down(self) -> None:
        self.members.pserver_down(0)

    def join(self, trainer: str) -> None:
        self.members.perform(self.membership.join(trainer, 7))

    def next(self, generation: int) -> ViewRequest | None:
        return self.members.next_view(0, generation, "p")

    def take(self, generation: int) -> ViewRequest:
        view = self.next(generation)
        assert view is not None
        return view

    def answer(self, generation: int) -> None:
        self.members.view_answered(0, generation, ViewReply(serial=self.take(generation).serial))

    def check_all_is_told(self, generation: int) -> None:
        """Give this process the newest view, so that all its members are admitted."""
        view = self.take(generation)
        assert view.serial == self.membership.view.serial
        self.members.view_answered(0, generation, ViewReply(serial=view.serial))
        assert self.next(generation) is None
        assert self.membership.is_quiet
        assert all(member.is_admitted for member in self.membership.members)


@pytest.fixture(params=[Sync(), Async()], ids=["sync", "async"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    made.membership.check()


def test_a_view_for_the_successor_is_not_sent_to_the_old_process(bench: Bench) -> None:
    bench.up(NEW)
    assert bench.next(OLD) is None
    bench.check_all_is_told(NEW)


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "failed"])
def test_the_old_process_answer_to_a_view_does_not_count_for_the_new_one(bench: Bench, is_answered: bool) -> None:
    view = bench.take(OLD)
    bench.up(NEW)
    if is_answered:
        bench.members.view_answered(0, OLD, ViewReply(serial=view.serial))
    else:
        bench.members.view_lost(0, OLD, view.serial)
    assert bench.next(OLD) is None
    bench.check_all_is_told(NEW)


def test_a_view_that_failed_is_sent_again_to_the_same_process(bench: Bench) -> None:
    bench.members.view_lost(0, OLD, bench.take(OLD).serial)
    bench.check_all_is_told(OLD)


def test_a_pserver_that_was_unreachable_gets_the_view_again(bench: Bench) -> None:
    bench.take(OLD)
    bench.down()
    bench.up(OLD)
    bench.check_all_is_told(OLD)
