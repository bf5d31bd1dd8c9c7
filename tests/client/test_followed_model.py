"""A follower's copy: what each message changes, and what it must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from flightedl.client.following.copy import FollowedModel
from flightedl.client.following.follower import _STOPPED_S, Follower
from flightedl.domain.feed.follower import Use
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.placement import BUCKETS, as_ids, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import DeadlineError, MessageError
from flightedl.messages.base import encode
from flightedl.messages.feed import ChangesHeader, Position
from flightedl.wire.changes import HEADER_KEY, Change, encode_changes
from tests.support.clock import FakeClock
from tests.support.contracts.coordinator import eventually
from tests.support.processes import closed_port

SPEC = TableSpec("users", 2, SGD(lr=1.0), evict=Evict(unused_versions=5), unknown="zero")
IDS = as_ids(np.arange(200))
LOW = IDS[buckets_of(IDS, SPEC.salt) < 512]
HIGH = IDS[buckets_of(IDS, SPEC.salt) >= 512]


def header(number: int, since: int | None, buckets: range, generation: int = 5, placement: int = 1) -> ChangesHeader:
    position = Position(life=1, generation=generation, placement=placement, number=number)
    return ChangesHeader(position=position, since=since, blocks=[(0, 1)], buckets=[(buckets.start, buckets.stop)])


def rows(ids: np.ndarray, value: float, version: int = 1) -> Change:
    values = np.full((ids.size, 2), value, np.float32)
    ages = (np.full(ids.size, each, np.uint32) for each in (version, 0))
    return Change("rows", "users", 0, 0, 0, 0, 0, ids, *ages, values)


def send(model: FollowedModel, server: int, head: ChangesHeader, *changes: Change) -> Use:
    received = model.begin(head, 1.0)
    received.add([*changes, Change("end", block=len(changes))])
    assert received.is_complete
    return model.apply(server, received)


@pytest.fixture
def model() -> FollowedModel:
    return FollowedModel(plan_shards([ParameterSpec("w", (6,))], 2, tables=[SPEC]))


def value_of(model: FollowedModel, ids: np.ndarray) -> set[float]:
    return set(model.read("users", ids)[0].reshape(-1).tolist())


def test_a_bucket_is_read_from_its_newest_owner(model: FollowedModel) -> None:
    send(model, 0, header(1, None, range(BUCKETS)), Change("clear", start=0, stop=BUCKETS), rows(IDS, 1.0))
    assert value_of(model, IDS) == {1.0}
    moved = header(1, None, range(512, BUCKETS), generation=6, placement=2)
    assert send(model, 1, moved, Change("clear", start=512, stop=BUCKETS), rows(HIGH, 2.0)) is Use.APPLY
    assert (value_of(model, LOW), value_of(model, HIGH)) == ({1.0}, {2.0})
    late = header(2, 1, range(BUCKETS))
    send(model, 0, late, Change("clear", start=500, stop=600), rows(IDS, 3.0))
    assert (value_of(model, LOW), value_of(model, HIGH)) == ({3.0}, {2.0})
    back = header(3, 2, range(BUCKETS), placement=3)
    send(model, 0, back, Change("clear", start=512, stop=BUCKETS), rows(HIGH, 4.0))
    assert value_of(model, HIGH) == {4.0}
    found, _ = model.rows("users")
    assert sorted(found.tolist()) == IDS.tolist()


def test_a_new_base_replaces_all_rows_and_values_of_a_pserver(model: FollowedModel) -> None:
    w = Change("values", "w", 0, 0, 6, 7, values=np.arange(6, dtype=np.float32))
    send(model, 0, header(9, None, range(BUCKETS)), w, Change("clear", start=0, stop=BUCKETS), rows(IDS, 1.0))
    assert model.is_complete
    before = model.array("w")
    older = Change("values", "w", 0, 0, 6, 3, values=np.zeros(6, np.float32))
    restored = header(2, None, range(BUCKETS), generation=8)
    assert send(model, 0, restored, older, Change("clear", start=0, stop=BUCKETS), rows(IDS[:3], 5.0)) is Use.APPLY
    assert value_of(model, IDS[:3]) == {5.0}
    assert value_of(model, IDS[3:]) == {0.0}
    assert before.tolist() == list(range(6))
    assert model.array("w").tolist() == [0] * 6
    assert send(model, 0, header(10, 9, range(BUCKETS)), w) is Use.IGNORE
    assert model.since(0) == restored.position


def test_removed_and_expired_rows_leave(model: FollowedModel) -> None:
    whole = Change("clear", start=0, stop=BUCKETS)
    send(model, 0, header(1, None, range(BUCKETS)), whole, rows(LOW, 1.0), rows(HIGH, 1.0, 9))
    oldest = np.full(BUCKETS, 2, np.int64)
    expiry = Change("expiry", "users", start=0, stop=BUCKETS, versions=oldest)
    send(model, 0, header(2, 1, range(BUCKETS)), Change("removed", "users", ids=HIGH[:4]), expiry)
    assert sorted(model.rows("users")[0].tolist()) == HIGH[4:].tolist()
    assert value_of(model, LOW) == {0.0}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change("values", "x", 0, 0, 6, 1, values=np.zeros(6, np.float32)), "no such elements"),
        (Change("values", "w", 0, 0, 7, 1, values=np.zeros(7, np.float32)), "no such elements"),
        (Change("values", "w", 0, 0, 6, 1, values=np.zeros(5, np.float32)), "another size"),
        (rows(IDS, 1.0)._replace(name="x"), "no table 'x'"),
        (rows(IDS, 1.0)._replace(versions=b""), "another size"),
    ],
)
def test_messages_that_do_not_fit_the_model_change_nothing(model: FollowedModel, change: Change, text: str) -> None:
    with pytest.raises(MessageError, match=text):
        send(model, 0, header(1, None, range(BUCKETS)), change)
    assert model.since(0) is None


def test_a_message_without_its_end_is_incomplete(model: FollowedModel) -> None:
    received = model.begin(header(1, None, range(BUCKETS)), 1.0)
    received.add([Change("clear", start=0, stop=3)])
    assert not received.is_complete
    with pytest.raises(MessageError, match="1 changes arrived, but 2 were sent"):
        received.add([Change("end", block=2)])


class SlowPserver:
    """A connection to a pserver whose answer arrives five seconds after the request."""

    def __init__(self, clock: FakeClock, head: ChangesHeader, *changes: Change) -> None:
        self._clock = clock
        self._batch = encode_changes([*changes, Change("end", block=len(changes))])
        self.schema = pa.schema([], {HEADER_KEY: encode(head)})

    def get(self, *_: object, **__: object) -> Any:
        self._clock.advance(5.0)
        return contextlib.nullcontext(self)

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, None]]:
        yield self._batch, None


def test_an_answer_to_an_earlier_request_does_not_end_catching_up() -> None:
    clock, model = FakeClock(10.0), FollowedModel(plan_shards([ParameterSpec("w", (6,))], 1))
    w = Change("values", "w", 0, 0, 6, 7, values=np.zeros(6, np.float32))
    pserver: Any = SlowPserver(clock, header(1, None, range(0)), w)
    with closed_port() as port, Follower(etcd=f"127.0.0.1:{port}", job="demo") as follower:
        follower._clock, follower._model = clock, model
        assert follower._ask(0, model, pserver)
        assert (model.covers(9.0), model.covers(12.0)) == (True, False)
        assert follower.age_s == 5.0, "the pserver may have changed since it was asked"
        follower._clock = FakeClock(9.0)
        follower.catch_up(0.0)
        follower._clock = FakeClock(12.0)
        with pytest.raises(DeadlineError):
            follower.catch_up(0.0)
        follower._clock = clock
        unchanged: Any = SlowPserver(clock, header(1, 1, range(0)))
        assert not follower._ask(0, model, unchanged)
        assert follower.age_s == 0.0


def test_a_job_that_was_started_again_is_followed_although_its_blocks_have_moved_less_often() -> None:
    """Users keep the complete copy of the former model, which gets older, until the new model's copy is complete."""
    clock, plan = FakeClock(10.0), plan_shards([ParameterSpec("w", (6,))], 2)
    every = [(0, plan.block_count)]

    def sent(life: int, placement: int, value: float, blocks: list[tuple[int, int]], generation: int) -> Any:
        position = Position(life=life, generation=generation, placement=placement, number=1)
        return SlowPserver(clock, ChangesHeader(position=position, since=None, blocks=blocks), w_of(value))

    with closed_port() as port, Follower(etcd=f"127.0.0.1:{port}", job="demo") as follower:
        follower._clock, follower._model = clock, FollowedModel(plan)

        def ask(server: int, pserver: Any) -> None:
            assert follower._model is not None
            follower._ask(server, follower._model, pserver)

        ask(1, sent(3, 7, 1.0, [], 4))
        ask(0, sent(3, 7, 1.0, every, 5))
        follower.wait(0.0)
        assert follower.age_s == 10.0
        ask(1, sent(9, 1, 2.0, [], 11))
        ask(1, sent(9, 1, 2.0, [], 11))
        assert (set(follower["w"].tolist()), follower.age_s) == ({1.0}, 20.0)
        ask(0, sent(3, 8, 5.0, every, 5))
        assert (set(follower["w"].tolist()), follower.age_s) == ({1.0}, 25.0), "a late answer counts"
        ask(0, sent(9, 1, 2.0, every, 12))
        assert (set(follower["w"].tolist()), follower.age_s) == ({2.0}, 15.0)


def w_of(value: float) -> Change:
    return Change("values", "w", 0, 0, 6, 7, values=np.full(6, value, np.float32))


def test_values_of_a_former_owner_do_not_replace_those_of_its_successor(model: FollowedModel) -> None:
    send(model, 0, header(1, None, range(0)), w_of(1.0))
    send(model, 1, header(1, None, range(0), generation=6, placement=2), w_of(2.0))
    assert send(model, 0, header(2, 1, range(0)), w_of(3.0)) is Use.APPLY
    assert set(model.array("w").tolist()) == {2.0}
    send(model, 0, header(3, 2, range(0), placement=3), w_of(4.0))
    assert set(model.array("w").tolist()) == {4.0}


def test_only_a_complete_answer_for_the_present_model_counts() -> None:
    clock, model = FakeClock(10.0), FollowedModel(plan_shards([ParameterSpec("w", (6,))], 1))
    with closed_port() as port, Follower(etcd=f"127.0.0.1:{port}", job="demo") as follower:
        follower._clock, follower._model = clock, model
        cut_off: Any = SlowPserver(clock, header(1, None, range(0)), w_of(1.0))
        cut_off._batch = encode_changes([w_of(1.0)])
        with pytest.raises(MessageError, match="the end of a message"):
            follower._ask(0, model, cut_off)
        assert model.since(0) is None
        assert not model.array("w").any()
        stopped: Any = SlowPserver(clock, msgspec.structs.replace(header(1, None, range(0)), checkpoint=3), w_of(1.0))
        assert follower._ask(0, model, stopped)
        assert model.checkpoint == 3
        assert follower.age_s == clock.now(), "the pserver may have changes after the checkpoint"
        follower._model = FollowedModel(model.plan)
        pserver: Any = SlowPserver(clock, header(2, 1, range(0)), w_of(2.0))
        assert not follower._ask(0, model, pserver), "an answer for a former model counts"
        assert follower.age_s == clock.now()
        assert follower.model().since(0) is None


def test_a_copy_is_up_to_date_when_each_block_and_bucket_has_an_owner_that_has_answered_since(
    model: FollowedModel,
) -> None:
    def ask(server: int, head: ChangesHeader, asked: float) -> None:
        received = model.begin(head, asked)
        received.add([Change("end", block=0)])
        model.apply(server, received)

    ask(0, header(1, None, range(BUCKETS)), 1.0)
    assert (model.covers(0.5), model.covers(1.0)) == (True, False)
    ask(1, header(1, None, range(0), placement=1), 3.0)
    ask(0, header(2, 1, range(512), placement=2), 3.0)
    assert not model.covers(2.0), "the other buckets have left for the pserver that answered before"
    ask(1, header(2, 1, range(512, BUCKETS), placement=2), 4.0)
    assert model.covers(2.0)


def test_a_part_does_not_stay_for_ever_at_a_checkpoint_that_the_others_do_not_reach() -> None:
    clock, plan = FakeClock(10.0), plan_shards([ParameterSpec("w", (600_000,))], 2)
    model, halves = FollowedModel(plan), (plan.blocks_of(0), plan.blocks_of(1))

    def apply(server: int, checkpoint: int | None) -> None:
        blocks = [(each, each + 1) for each in halves[server]]
        head = msgspec.structs.replace(header(1, None, range(0)), blocks=blocks, buckets=[], checkpoint=checkpoint)
        send(model, server, head)

    with closed_port() as port, Follower(etcd=f"127.0.0.1:{port}", job="demo") as follower:
        follower._clock, follower._model, follower._is_stopping = clock, model, True
        apply(0, 7)
        with ThreadPoolExecutor(1) as executor:
            staying = executor.submit(follower._stay, 0, model)
            with pytest.raises(TimeoutError):
                staying.result(0.5)
            clock.advance(_STOPPED_S + 1)
            staying.result(20.0)
            assert follower._stopped_at() is None
            apply(1, 7)
            # All parts have reached the checkpoint, so the copy stays there as long as the user wants.
            both = [executor.submit(follower._stay, 0, model)]
            with ThreadPoolExecutor(1) as other:
                both.append(other.submit(follower._stay, 1, model))
                eventually(lambda: follower._stopped_at() == 7)
                clock.advance(10 * _STOPPED_S)
                with pytest.raises(TimeoutError):
                    both[0].result(0.5)
                follower._is_stopping = False
                for each in both:
                    each.result(20.0)


def test_catching_up_waits_for_blocks_that_their_owner_had_frozen() -> None:
    """The second pserver may have got blocks, and changed them, since it answered."""
    clock, plan = FakeClock(10.0), plan_shards([ParameterSpec("w", (6,))], 2)
    every = [(0, plan.block_count)]
    others = msgspec.structs.replace(header(1, None, range(0), generation=6), blocks=[])
    frozen = msgspec.structs.replace(header(1, None, range(0)), blocks=every, leaving=every)
    thawed = msgspec.structs.replace(header(2, 1, range(0)), blocks=every)
    with closed_port() as port, Follower(etcd=f"127.0.0.1:{port}", job="demo") as follower:
        follower._clock, follower._model = clock, FollowedModel(plan)
        for server, head in ((1, others), (0, frozen), (0, thawed)):
            follower._clock = FakeClock(9.0)
            with pytest.raises(DeadlineError):
                follower.catch_up(0.0)
            follower._clock = clock
            pserver: Any = SlowPserver(clock, head)
            follower._ask(server, follower.model(), pserver)
        follower._clock = FakeClock(19.0)
        follower.catch_up(0.0)
        follower._clock = FakeClock(21.0)
        with pytest.raises(DeadlineError):
            follower.catch_up(0.0)


def test_arrays_of_a_copy_are_read_only(model: FollowedModel) -> None:
    send(model, 0, header(1, None, range(BUCKETS)), w_of(1.0))
    with pytest.raises(ValueError, match="read-only"):
        model.array("w")[0] = 2.0
    with pytest.raises(ValueError, match="read-only"):
        model.arrays()["w"][0] = 2.0


def test_a_copy_lacks_the_buckets_that_a_new_base_lacks(model: FollowedModel) -> None:
    whole = Change("clear", start=0, stop=BUCKETS)
    send(model, 0, header(1, None, range(BUCKETS)), w_of(1.0), whole, rows(IDS, 1.0))
    assert model.is_complete
    half = header(1, None, range(512), generation=8, placement=2)
    send(model, 0, half, w_of(1.0), Change("clear", start=0, stop=512), rows(LOW, 2.0))
    assert not model.is_complete, "the other buckets are not known yet"
    rest = header(1, None, range(512, BUCKETS), generation=9, placement=2)
    send(model, 1, rest, Change("clear", start=512, stop=BUCKETS), rows(HIGH, 3.0))
    assert model.is_complete
    assert (value_of(model, LOW), value_of(model, HIGH)) == ({2.0}, {3.0})


def test_a_bucket_that_is_sent_again_loses_its_earlier_rows(model: FollowedModel) -> None:
    whole = Change("clear", start=0, stop=BUCKETS)
    send(model, 0, header(1, None, range(BUCKETS)), whole, rows(IDS, 1.0))
    send(model, 0, header(2, 1, range(BUCKETS)), Change("clear", start=0, stop=512), rows(LOW[:3], 2.0))
    assert value_of(model, LOW[3:]) == {0.0}, "rows that were removed since then are still there"
    assert sorted(model.rows("users")[0].tolist()) == sorted([*LOW[:3].tolist(), *HIGH.tolist()])
