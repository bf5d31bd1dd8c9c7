"""Views on their way to pservers: each process gets the newest one, however its predecessor ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flightedl.config import MasterSettings
from flightedl.coordination.keys import JobKeys
from flightedl.domain.membership import Membership
from flightedl.domain.modes import Async, Mode, Sync
from flightedl.errors import NotReadyError
from flightedl.master.evaluations import Evaluations
from flightedl.master.indexing import DatasetIndexing
from flightedl.master.members import Members
from flightedl.master.state import JobState
from flightedl.messages.control import ViewReply, ViewRequest
from flightedl.messages.declarations import ModelDeclaration, ModelReply, ParameterDeclaration
from flightedl.testing.clock import FakeClock
from flightedl.testing.memory import MemoryCoordinator, MemoryFiles

KEYS = JobKeys("demo")
MASTER = 5
OLD, NEW = 10, 20


class Durable(JobState):
    """A job's state that is durable as soon as it is changed, unless etcd is away."""

    is_away = False

    def wait_durable(self, revision: int) -> None:
        assert revision <= self.revision
        if self.is_away:
            raise NotReadyError("etcd is away")


class Bench:
    """The members of a job with one pserver, whose first process has had the first view, and one trainer."""

    def __init__(self, mode: Mode) -> None:
        clock = FakeClock()
        evaluations = Evaluations(lambda: DatasetIndexing(MemoryFiles(), clock), 3)
        chosen = MasterSettings(etcd="memory:1", job="demo", pservers=1)
        self.state = Durable(chosen, 1, MemoryCoordinator(clock), KEYS, clock, evaluations)
        self.woken = 0
        self.members = Members(self.state, MASTER, self._wake)
        model = ModelDeclaration(
            parameters=[ParameterDeclaration(name="w", shape=[4], dtype="float32")],
            optimizer={"kind": "SGD", "lr": 0.1},
            mode=mode.to_json(),
        )
        with self.state.changed:
            self.members.begin(ModelReply(declaration=model, pservers=1, plan_hash="p"), None)
        self.up(OLD)
        self.answer(OLD)
        self.join("t")

    def _wake(self, _index: int) -> None:
        self.woken += 1

    @property
    def membership(self) -> Membership:
        assert self.state.membership is not None
        return self.state.membership

    def up(self, generation: int) -> None:
        with self.state.changed:
            self.members.pserver_up(0, generation)

    def down(self) -> None:
        with self.state.changed:
            self.members.pserver_down(0)

    def join(self, trainer: str) -> None:
        with self.state.changed:
            self.members._perform(self.membership.join(trainer, 7))

    def take(self, generation: int) -> ViewRequest:
        view = self.members.next_view(0, generation)
        assert view is not None
        return view

    def answer(self, generation: int) -> None:
        self.members.view_answered(0, generation, ViewReply(serial=self.take(generation).serial))

    def check_all_is_told(self, generation: int) -> None:
        """This process gets the newest view, and everybody in it is a member then."""
        view = self.take(generation)
        assert view.serial == self.membership.view.serial
        self.members.view_answered(0, generation, ViewReply(serial=view.serial))
        assert self.members.next_view(0, generation) is None
        assert self.membership.is_quiet
        assert all(member.is_admitted for member in self.membership.members)


@pytest.fixture(params=[Sync(), Async()], ids=["sync", "async"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    made.membership.check()


def test_a_view_for_the_successor_is_not_taken_by_who_still_talks_to_the_old_process(bench: Bench) -> None:
    bench.up(NEW)
    assert bench.members.next_view(0, OLD) is None
    bench.check_all_is_told(NEW)


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "failed"])
def test_what_became_of_a_view_at_the_old_process_says_nothing_of_the_new_one(bench: Bench, is_answered: bool) -> None:
    view = bench.take(OLD)
    bench.up(NEW)
    if is_answered:
        bench.members.view_answered(0, OLD, ViewReply(serial=view.serial))
    else:
        bench.members.view_failed(0, OLD, view.serial)
    assert bench.members.next_view(0, OLD) is None
    bench.check_all_is_told(NEW)


def test_a_view_that_failed_is_sent_again_to_the_same_process(bench: Bench) -> None:
    bench.members.view_failed(0, OLD, bench.take(OLD).serial)
    bench.check_all_is_told(OLD)


def test_a_pserver_that_was_gone_and_is_the_same_process_gets_the_view(bench: Bench) -> None:
    bench.take(OLD)
    bench.down()
    bench.up(OLD)
    bench.check_all_is_told(OLD)


def test_a_view_that_could_not_be_made_durable_is_kept_unless_a_newer_one_came(bench: Bench) -> None:
    bench.state.is_away = True
    with pytest.raises(NotReadyError):
        bench.members.next_view(0, OLD)
    bench.join("u")
    bench.state.is_away = False
    bench.members.view_answered(0, OLD, ViewReply(serial=bench.take(OLD).serial))
    bench.check_all_is_told(OLD)
