from __future__ import annotations

import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import MAX_BATCHES_PER_TASK, MAX_TASKS, Batch
from flightedl.errors import CorruptError, MessageError
from tests.domain.bitmaps import tasks_in

COUNTS = [1, 3, 9]  # batches of tasks 0, 1, 2
BATCHES = [(e, t, b) for e in range(2) for t, count in enumerate(COUNTS) for b in range(count)]

marks = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(BATCHES)), max_size=120)
unmarks = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(BATCHES)), max_size=10)


def marked(applied: AppliedBatches, model: set, actions) -> None:
    for block, identity in actions:
        batch = Batch(*identity)
        assert applied.mark([block], batch, COUNTS[batch.task]) == ((block, batch) not in model)
        model.add((block, batch))
    applied.check()


def assert_equal(applied: AppliedBatches, model: set) -> None:
    applied.check()
    blocks = applied.numbers
    for block in blocks:
        for identity in BATCHES:
            assert applied.has(block, Batch(*identity)) == ((block, Batch(*identity)) in model)
    for epoch in range(2) if blocks else ():
        missing = {
            task: [b for b in range(count) if any((k, (epoch, task, b)) not in model for k in blocks)]
            for task, count in enumerate(COUNTS)
        }
        assert tasks_in(applied.done_bitmap(epoch)) == [task for task in missing if not missing[task]]
        assert applied.incomplete_tasks(epoch) == in_part(model, blocks, epoch)


def in_part(model: set, blocks: list[int], epoch: int) -> dict[int, bytes]:
    """Return the batches of blocks of incomplete tasks; empty where blocks differ."""
    found = {}
    for task, count in enumerate(COUNTS):
        every = {tuple((k, (epoch, task, b)) in model for b in range(count)) for k in blocks}
        if every not in ({(True,) * count}, {(False,) * count}):
            bits = sum(1 << batch for batch, has in enumerate(min(every)) if has)
            found[task] = bits.to_bytes((count + 7) // 8, "little") if len(every) == 1 else b""
    return found


@given(marks, st.booleans(), unmarks, marks)
@settings(max_examples=80, deadline=None)
def test_it_behaves_like_a_set_of_pairs(first, has_task_count, taken, second):
    applied, model = AppliedBatches(range(4)), set()
    if has_task_count:
        applied.set_task_count(0, 3)
    marked(applied, model, first)
    if has_task_count:
        applied.set_task_count(1, 3)
    assert_equal(applied, model)
    for block, identity in taken:
        batch = Batch(*identity)
        applied.unmark((block,), batch, COUNTS[batch.task])
        model.discard((block, batch))
    assert_equal(applied, model)
    copy = applied.copy()
    before = set(model)
    marked(applied, model, second)
    assert_equal(applied, model)
    assert_equal(copy, before)
    assert_equal(AppliedBatches.decode(applied.encode(), range(4)), model)


@given(st.lists(marks, min_size=1, max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_a_set_moves_with_its_block(parts, data):
    sources = [AppliedBatches(range(4)) for _ in parts]
    models = [set() for _ in parts]
    for source, model, actions in zip(sources, models, parts, strict=True):
        marked(source, model, actions)
    chosen = data.draw(st.dictionaries(st.integers(0, 3), st.integers(0, len(parts) - 1), min_size=1))
    rebuilt = AppliedBatches.rebuilt({block: sources[number] for block, number in chosen.items()})
    expected = {(block, batch) for block, number in chosen.items() for at, batch in models[number] if at == block}
    assert_equal(rebuilt, expected)
    for source, model in zip(sources, models, strict=True):
        assert_equal(source, model)
    assert_equal(AppliedBatches.decode(rebuilt.encode(), sorted(chosen)), expected)
    if len(chosen) == 4:
        marked(rebuilt, expected, data.draw(marks))
        assert_equal(rebuilt, expected)


class Moves(RuleBasedStateMachine):
    """Blocks move between three pservers while batches are marked and task counts are set."""

    def __init__(self) -> None:
        super().__init__()
        self.pservers = [AppliedBatches(range(3)), AppliedBatches(range(3, 6)), AppliedBatches(())]
        self.model: set[tuple[int, Batch]] = set()
        self.counted: set[int] = set()

    @rule(pserver=st.integers(0, 2), block=st.integers(0, 5), batch=st.sampled_from(BATCHES))
    def mark(self, pserver: int, block: int, batch: tuple[int, int, int]) -> None:
        applied, identity = self.pservers[pserver], Batch(*batch)
        blocks = [number for number in applied.numbers if number <= block]
        new = {(number, identity) for number in blocks} - self.model
        assert applied.mark(blocks, identity, COUNTS[identity.task]) == len(new)
        self.model |= new

    @rule(pserver=st.integers(0, 2), task=st.integers(0, 2), epoch=st.integers(0, 1))
    def mark_task_on_all(self, pserver: int, task: int, epoch: int) -> None:
        applied = self.pservers[pserver]
        for number in range(COUNTS[task]):
            applied.mark(applied.numbers, Batch(epoch, task, number), COUNTS[task])
            self.model |= {(block, Batch(epoch, task, number)) for block in applied.numbers}

    @rule(first=st.integers(0, 5), length=st.integers(1, 3), to=st.integers(0, 2))
    def move(self, first: int, length: int, to: int) -> None:
        source = next(applied for applied in self.pservers if first in applied.numbers)
        blocks = [block for block in range(first, first + length) if block in source.numbers]
        self.pservers[to].adopt(blocks, source.release(blocks))

    @rule(pserver=st.integers(0, 2), epoch=st.integers(0, 1))
    def set_task_count(self, pserver: int, epoch: int) -> None:
        self.pservers[pserver].set_task_count(epoch, 3)

    @invariant()
    def every_block_has_its_batches(self) -> None:
        assert sorted(block for applied in self.pservers for block in applied.numbers) == list(range(6))
        for applied in self.pservers:
            assert_equal(applied, {pair for pair in self.model if pair[0] in applied.numbers})


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_block_that_lacks_a_batch_keeps_lacking_it_when_it_moves():
    """The others then have the complete task, and one cohort contains all of them."""
    applied = AppliedBatches(range(5, 8))
    fill(applied, [5, 7], 0)
    fill(applied, [6], 0, tasks=2)
    released = applied.release([6])
    alone = AppliedBatches([5, 7])
    fill(alone, [5, 7], 0)
    assert applied.encode() == alone.encode()
    assert tasks_in(applied.done_bitmap(0)) == [0, 1, 2]
    applied.adopt([6], released)
    assert tasks_in(applied.done_bitmap(0)) == [0, 1]
    assert [applied.has(block, Batch(0, 2, 0)) for block in (5, 6, 7)] == [True, False, True]


def test_returning_blocks_need_no_more_memory():
    applied = AppliedBatches(range(4))
    fill(applied, range(4), 0)
    before = applied.encode()
    for block in (3, 0, 2):
        applied.adopt([block], applied.release([block]))
    assert applied.encode() == before


def test_the_epochs_of_a_moved_block_collapse_wherever_their_size_was_set():
    source, target = AppliedBatches([0]), AppliedBatches([1])
    fill(source, [0], 0)
    fill(target, [1], 0)
    target.set_task_count(0, 3)
    source.set_task_count(1, 3)
    target.adopt([0], source.release([0]))
    assert target.completed_task_count(0) == 3
    fill(target, [0, 1], 1)
    assert target.completed_task_count(1) == 3
    assert source.numbers == source.epochs() == []


@pytest.mark.parametrize(
    ("told", "marked_task", "text"),
    [(2, None, "other numbers of tasks"), (0, 7, "a task with a higher number was applied")],
)
def test_a_block_with_longer_epochs_is_refused_and_nothing_is_done(told, marked_task, text):
    source, target = AppliedBatches([0]), AppliedBatches([1])
    if told:
        source.set_task_count(0, told)
    if marked_task is not None:
        source.mark([0], Batch(0, marked_task, 0), 1)
    target.set_task_count(0, 3)
    before = target.encode()
    released = source.release([0])
    with pytest.raises(MessageError, match=text):
        target.adopt([0], released)
    assert (target.encode(), target.numbers) == (before, [1])
    with pytest.raises(MessageError, match="are already here"):
        target.adopt([1], released)
    with pytest.raises(CorruptError):
        target.adopt([2], released[:-1])


def fill(applied: AppliedBatches, blocks, epoch: int, tasks: int = 3) -> None:
    for task in range(tasks):
        for batch in range(COUNTS[task]):
            applied.mark(blocks, Batch(epoch, task, batch), COUNTS[task])


def test_a_complete_epoch_takes_only_its_number():
    applied = AppliedBatches(range(4))
    applied.set_task_count(0, 3)
    empty = len(applied.encode())
    fill(applied, range(4), 0)
    assert len(applied.encode()) <= empty + 4
    assert tasks_in(applied.done_bitmap(0)) == [0, 1, 2]
    assert not applied.mark([2], Batch(0, 2, 8), 9)
    applied.set_task_count(0, 3)


def test_a_million_tasks_take_a_bit_each():
    applied = AppliedBatches(range(3))
    for task in range(0, 20_000, 2):
        applied.mark(range(3), Batch(0, task, 0), 1)
    assert len(applied.encode()) < 20_000 / 8 + 100
    assert tasks_in(applied.done_bitmap(0)) == list(range(0, 20_000, 2))


def test_blocks_added_later_have_nothing_and_share_again_when_they_have_all():
    applied = AppliedBatches(range(2))
    fill(applied, range(2), 0)
    add(applied, 2, 3)
    assert tasks_in(applied.done_bitmap(0)) == []
    assert applied.has(1, Batch(0, 1, 1))
    assert not applied.has(2, Batch(0, 1, 1))
    assert applied.mark(range(4), Batch(0, 0, 0), 1) == 2
    fill(applied, range(2, 4), 0)
    assert tasks_in(applied.done_bitmap(0)) == [0, 1, 2]
    applied.merge()
    applied.check()
    shared = AppliedBatches(range(4))
    fill(shared, range(4), 0)
    assert applied.encode() == shared.encode()


def add(applied: AppliedBatches, *blocks: int) -> None:
    """Adopt blocks without batches."""
    for block in blocks:
        applied.adopt([block], AppliedBatches([block]).release([block]))


def test_cached_ranges_remain_right_when_blocks_move_and_cohorts_join():
    applied = AppliedBatches(range(2))
    first, second = Batch(0, 0, 0), Batch(0, 1, 0)
    assert applied.mark(range(1, 2), first, 2) == 1
    add(applied, 2, 3, 4)
    # The same ranges in both cohorts, and in the remaining one.
    assert [applied.count_having(stretch, first) for stretch in (range(2), range(1, 4), range(5))] == [1, 1, 1]
    assert applied.mark(range(5), first, 2) == 4
    applied.merge()
    assert applied.mark_together(range(1, 4), [(second, 2)]) == [0]
    assert [applied.has(block, second) for block in range(5)] == [False, True, True, True, False]
    assert applied.mark(range(5), second, 2) == 2
    assert applied.count_having(range(2), second) == 2


def test_an_epoch_is_complete_when_it_is_complete_in_every_block():
    applied = AppliedBatches(range(1))
    applied.mark([0], Batch(0, 0, 0), 1)
    assert applied.completed_task_count(0) is None
    applied.set_task_count(0, 1)
    assert applied.completed_task_count(0) == 1
    other = AppliedBatches(range(1))
    other.mark([0], Batch(0, 0, 0), 1)
    assert other.completed_task_count(0) is None
    add(applied, 1)
    assert applied.completed_task_count(0) is None


def test_blocks_can_be_adopted_into_an_empty_set():
    applied = AppliedBatches(())
    assert tasks_in(applied.done_bitmap(0)) == []
    add(applied, 0, 1, 2)
    assert applied.encode() == AppliedBatches(range(3)).encode()


@pytest.mark.parametrize(
    ("batch", "batch_count"),
    [
        (Batch(0, 1, 4), 4),
        (Batch(0, 1, -1), 4),
        (Batch(-1, 1, 0), 4),
        (Batch(0, -1, 0), 4),
        (Batch(0, MAX_TASKS, 0), 4),
        (Batch(0, 1, 0), 0),
        (Batch(0, 1, 0), 1 << 40),
        (Batch(0, 1, 0), 3),  # the task has 4
        (Batch(5, 2, 0), 1),  # the epoch has 2 tasks
    ],
)
def test_an_impossible_batch_is_refused_and_nothing_is_done(batch, batch_count):
    applied = AppliedBatches(range(2))
    applied.mark([0], Batch(0, 1, 0), 4)
    applied.set_task_count(5, 2)
    before = applied.encode()
    with pytest.raises(MessageError):
        applied.mark([1], batch, batch_count)
    with pytest.raises(MessageError):
        applied.mark([0, 1], batch, batch_count)
    with pytest.raises(MessageError):
        applied.mark_together([0], [(batch, batch_count)])
    assert applied.encode() == before


def test_an_epoch_cannot_be_shorter_than_its_applied_tasks():
    applied = AppliedBatches(range(1))
    applied.mark([0], Batch(0, 4, 0), 1)
    with pytest.raises(MessageError, match="a task with a higher number was applied"):
        applied.set_task_count(0, 4)
    with pytest.raises(MessageError, match="cannot have 0 tasks"):
        applied.set_task_count(0, 0)
    applied.check()


@pytest.mark.parametrize("task_count", [0, MAX_TASKS + 1])
def test_an_impossible_number_of_tasks_is_refused(task_count):
    with pytest.raises(MessageError, match="the limit is"):
        AppliedBatches(range(1)).set_task_count(0, task_count)


def test_the_lowest_and_the_highest_numbers_are_accepted():
    applied = AppliedBatches(range(1))
    applied.set_task_count(0, 1)
    applied.set_task_count(1, MAX_TASKS)
    assert applied.mark([0], Batch(2, 0, MAX_BATCHES_PER_TASK - 1), MAX_BATCHES_PER_TASK)
    applied.check()


def test_no_block_has_a_batch_beyond_those_of_its_task():
    applied = AppliedBatches(range(1))
    applied.mark([0], Batch(0, 0, 0), 8)
    assert not applied.has(0, Batch(0, 0, 8))


def test_blocks_that_differ_among_themselves_are_not_joined_with_similar_ones():
    sources = [AppliedBatches(range(2)), AppliedBatches(range(2, 4))]
    for source in sources:
        source.mark(source.numbers[:1], Batch(0, 0, 0), 2)
    rebuilt = AppliedBatches.rebuilt({block: sources[block // 2] for block in range(4)})
    rebuilt.check()
    assert [rebuilt.has(block, Batch(0, 0, 0)) for block in range(4)] == [True, False, True, False]


def test_blocks_that_were_joined_out_of_order_are_stored_in_order():
    sources = [AppliedBatches([0, 2]), AppliedBatches([1, 3])]
    applied = AppliedBatches.rebuilt({block: sources[block % 2] for block in range(4)})
    applied.mark([1], Batch(0, 0, 0), 2)
    stored = AppliedBatches.decode(applied.encode(), range(4))
    assert [stored.has(block, Batch(0, 0, 0)) for block in range(4)] == [False, True, False, False]


def test_invalid_bytes_are_refused():
    applied = AppliedBatches(range(2))
    fill(applied, [0], 0, tasks=2)
    applied.mark([1], Batch(0, 0, 0), 1)
    data = applied.encode()
    refused = 0
    for place in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[place] ^= 1 << bit
            try:
                AppliedBatches.decode(bytes(broken), range(2)).check()
            except CorruptError:
                refused += 1
    assert refused > len(data)
    for short in range(len(data)):
        with pytest.raises(CorruptError):
            AppliedBatches.decode(data[:short], range(2))
    with pytest.raises(CorruptError, match="format 9"):
        AppliedBatches.decode(msgspec.msgpack.encode([9, [], []]), ())
    with pytest.raises(CorruptError):
        AppliedBatches.decode(data, range(3))


@pytest.mark.slow
def test_memory_is_bounded_by_a_bit_per_task_and_the_batches_in_flight():
    """For any number of blocks, trainers and repetitions: 8,000 tasks in any order, 64 in flight, on 20 blocks."""
    blocks, tasks, batches, in_flight = range(20), 8_000, 3, 64
    order = list(range(tasks))
    random.Random(1).shuffle(order)
    applied = AppliedBatches(blocks)

    def held() -> int:
        """Return the bytes allocated by lines of the domain; other threads of this process allocate, too."""
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/flightedl/domain/*")])
        return sum(trace.size for trace in snapshot.traces)

    tracemalloc.start()
    try:
        applied.mark(blocks, Batch(0, order[0], 0), batches)
        base, peak = held(), 0
        for at in range(0, tasks, in_flight):
            for batch in range(batches):
                # Repeated batches, and batches that reach the blocks one by one, leave no trace in the end.
                applied.mark([7], Batch(0, order[at], batch), batches)
                for task in order[at : at + in_flight]:
                    applied.mark(blocks, Batch(0, task, batch), batches)
                    applied.mark(blocks, Batch(0, task, batch), batches)
                peak = max(peak, held() - base)
        used = held() - base
        applied.set_task_count(0, tasks)
        counted = held() - base
    finally:
        tracemalloc.stop()
    bits = tasks // 8
    print(f"{tasks} tasks on {len(blocks)} blocks: {used} bytes, peak {peak}, once its task count is known {counted}")
    # The interpreter has a few objects of its own; a byte for each task and block would be 160,000.
    assert used < 2 * bits + 10_000
    assert peak < 2 * bits + 1_000 * in_flight
    assert counted < 2_000


def test_a_sum_of_as_many_batches_as_cohorts_is_marked_in_all_of_them():
    applied = AppliedBatches(range(2))
    applied.mark(range(2), Batch(0, 1, 0), 1)
    add(applied, 2, 3)
    batches = [(Batch(0, 0, 0), 2), (Batch(0, 0, 1), 2)]
    assert applied.mark_together(range(1, 3), batches) == [0, 0]
    assert [[applied.has(block, batch) for block in range(4)] for batch, _ in batches] == [
        [False, True, True, False]
    ] * 2
