"""A follower that stops at a checkpoint has exactly its content, whatever it had before and whatever changed since."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.client.following.copy import FollowedModel
from flightedl.domain.consistency.modes import Async
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.placement import as_ids
from flightedl.domain.tables.spec import TableSpec
from flightedl.kernels.half_precision import shortened
from flightedl.messages.base import decode
from flightedl.messages.control import OrderNumber, SnapshotRequest, ViewMember, ViewRequest
from flightedl.messages.feed import ChangesHeader, ChangesTicket
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.pserver.cuts.snapshots import Snapshots
from flightedl.pserver.readers.feed import PserverFeed
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.interface import distinct
from flightedl.rowstore import tables
from flightedl.rowstore.tables import MAX_CUTS, TableGradients
from flightedl.wire.changes import HEADER_KEY, decode_changes
from flightedl.wire.rows import decode_batch, encode_rows
from tests.support.clock import FakeClock
from tests.support.memory import MemoryStorage

SPECS = [ParameterSpec("w", (7,)), ParameterSpec("b", (5,), "bfloat16")]
TABLE = TableSpec("users", 2, SGD(lr=1.0), evict=Evict(norm_below=0.5), unknown="zero")


class Content(NamedTuple):
    values: dict[str, bytes]
    rows: dict[int, list[float]]


class Bench:
    """A pserver with a feed, and followers."""

    def __init__(self) -> None:
        self.plan = plan_shards(SPECS, 1, tables=[TABLE])
        self.clock = FakeClock(100.0)
        self.shard = Shard(self.plan, 0, SGD(lr=1.0), Async(), on_lost=pytest.fail)
        member = ViewMember(trainer="t1", generation=1, member=1, first_round=0)
        self.shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=[member]))
        self.storage = MemoryStorage()
        self.snapshots = Snapshots(self.shard.copying, self.storage, "j", 0, 1, self.clock)
        self.feed = self.snapshots.feed = PserverFeed(self.shard, self.plan, 1, 5, self.clock)
        self.followers = [FollowedModel(self.plan) for _ in range(2)]
        self.version = self.number = 0
        self.expected = Content({}, {})

    def train(self, ids: list[int], value: float) -> None:
        """Change all values of one parameter, and some rows."""
        self.version += 1
        (rows,) = (span.rows for span in distinct(self.shard.rows.spans))
        header = PushHeader(
            trainer="t1",
            generation=1,
            plan_hash=self.plan.hash,
            member=1,
            identity=BatchIdentity(epoch=0, task=0, batch=self.version, batch_count=1000),
            weight=1.0,
            rows=1,
        )
        number = self.version % 2
        gradient = np.full(SPECS[number].size, value, np.float32)
        sent = [shortened(gradient, "bfloat16") if number else gradient]
        self.shard.push_rows(header, decode_batch(encode_rows([number], [0], sent)))
        with self.shard.rows.lock:
            gradients = np.full((len(ids), 2), value, np.float32)
            rows.update([TableGradients(0, as_ids(np.array(ids)), gradients)], version=self.version, epoch=0)

    def save(self) -> None:
        self.checkpoint()
        everyone = FollowedModel(self.plan)
        self.ask(everyone, is_marked=False)
        self.expected = content_of(everyone)

    def checkpoint(self) -> None:
        self.number += 1
        order = OrderNumber(1, self.number, 1)
        self.snapshots.order(SnapshotRequest(order, None, f"c-{self.number}/a.arrow", plan_hash="p"))
        waited = threading.Event()
        while (progress := self.snapshots.progress) is None or progress.state != "written":
            waited.wait(0.002)

    def ask(
        self, model: FollowedModel, *, is_marked: bool, meanwhile: Callable[[], object] = lambda: None
    ) -> ChangesHeader:
        """Request changes and apply them. Call ``meanwhile`` before each message is read."""
        ticket = ChangesTicket(plan_hash="p", since=model.since(0), marks=is_marked, wait_s=0.0)
        call: Any = SimpleNamespace(deadline=0.0, check=lambda: None, closing=threading.Event())
        answer = self.feed.changes(ticket, call)
        header = decode(answer.schema.metadata[HEADER_KEY], ChangesHeader)
        received = model.begin(header, self.clock.now())
        meanwhile()
        for batch, _ in answer.messages:
            received.add(decode_changes(batch))
            meanwhile()
        assert received.is_complete
        model.apply(0, received)
        return header


def content_of(model: FollowedModel) -> Content:
    ids, values = model.rows("users")
    rows = dict(zip(ids.tolist(), values.reshape(-1, 2).tolist(), strict=True))
    return Content({name: array.tobytes() for name, array in model.arrays().items()}, rows)


IDS = st.lists(st.integers(0, 12), unique=True, min_size=1)
STEPS = st.one_of(
    st.tuples(st.just("train"), IDS, st.sampled_from([-1.0, 1.0, 0.1])),
    st.tuples(st.just("ask"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("save")),
)


@pytest.mark.parametrize("most_removed", [3, 1000], ids=["few ids are kept", "all ids are kept"])
@settings(deadline=None, max_examples=40)
@given(steps=st.lists(STEPS, max_size=15))
def test_a_follower_at_a_mark_has_the_content_of_the_checkpoint(most_removed: int, steps: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_MOST_REMOVED", most_removed)
        _follow(steps)


def _follow(steps: list[Any]) -> None:
    bench = Bench()
    bench.train([1, 2, 3], 1.0)
    for follower in bench.followers:
        bench.ask(follower, is_marked=True)
    #: Followers that have not asked since the newest checkpoint.
    before: set[int] = set()
    for step in steps:
        match step:
            case ("train", ids, value):
                bench.train(ids, value)
            case ("save",):
                bench.save()
                before = {0, 1}
            case ("ask", index, is_marked):
                header = bench.ask(bench.followers[index], is_marked=is_marked)
                is_expected = is_marked and index in before
                assert header.checkpoint == (bench.number if is_expected else None)
                if is_expected:
                    assert content_of(bench.followers[index]) == bench.expected
                    assert bench.followers[index].checkpoint == bench.number
                before.discard(index)
    everyone = FollowedModel(bench.plan)
    bench.train([1], 1.0)
    bench.ask(everyone, is_marked=False)
    for follower in bench.followers:
        bench.ask(follower, is_marked=False)
        assert content_of(follower).rows == content_of(everyone).rows


def test_a_mark_is_dropped_when_no_client_asks_for_it() -> None:
    bench = Bench()
    bench.train([1, 2], 1.0)
    follower = bench.followers[0]
    bench.ask(follower, is_marked=True)
    bench.save()
    bench.clock.advance(30.0)
    bench.feed.expire()
    assert bench.ask(follower, is_marked=True).checkpoint is None
    bench.save()
    assert bench.ask(follower, is_marked=True).checkpoint == 2
    bench.clock.advance(30.0)
    bench.save()
    assert bench.ask(follower, is_marked=True).checkpoint is None


@pytest.mark.parametrize("is_marked", [False, True], ids=["newest", "marked"])
def test_an_answer_has_the_state_of_its_moment_however_late_it_is_read(is_marked: bool) -> None:
    bench = Bench()
    bench.train([1, 2, 3], 1.0)
    late, prompt = bench.followers
    for ids in ([1, 2], [3, 4, 5], [1, 6]):
        for follower in (late, prompt):
            bench.ask(follower, is_marked=is_marked)
        bench.train(ids, -1.0)
        if is_marked:
            bench.save()
            expected = bench.expected
        else:
            bench.ask(prompt, is_marked=False)
            expected = content_of(prompt)

        def train(ids: list[int] = ids) -> None:
            for value in (0.25, 1.0):
                bench.train([*ids, 7, 8], value)

        header = bench.ask(late, is_marked=is_marked, meanwhile=train)
        assert header.checkpoint == (bench.number if is_marked else None)
        assert content_of(late) == expected
    # The changes that came during the answers are not lost.
    for follower in (late, prompt):
        bench.ask(follower, is_marked=False)
    everyone = FollowedModel(bench.plan)
    bench.train([1], 1.0)
    bench.ask(everyone, is_marked=False)
    bench.ask(late, is_marked=False)
    assert content_of(late) == content_of(everyone)


def test_a_checkpoint_without_memory_for_its_mark_is_no_mark() -> None:
    bench = Bench()
    bench.train([1, 2], 1.0)
    follower = bench.followers[0]
    bench.ask(follower, is_marked=True)
    bench.save()
    mark = bench.feed._mark
    assert mark is not None
    mark[1].give_up("not enough memory")
    bench.train([1], 1.0)
    assert bench.ask(follower, is_marked=True).checkpoint is None
    assert content_of(follower).rows[1] == [-2.0, -2.0]


def test_marks_free_what_they_replace() -> None:
    bench = Bench()
    bench.train([1, 2], 1.0)
    follower = bench.followers[0]
    for number in range(1, 2 * MAX_CUTS):
        bench.ask(follower, is_marked=True)
        bench.train([1], 1.0)
        bench.save()
        if number % 2:
            assert bench.ask(follower, is_marked=True).checkpoint == number
    mark = bench.feed._mark
    assert mark is not None
    bench.clock.advance(30.0)
    bench.feed.expire()
    assert bench.feed._mark is None
    assert not mark[1].values
    assert all(each.cut.is_over for each in mark[1].rows)
