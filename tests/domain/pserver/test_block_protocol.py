"""Effects of pushes, pulls, views and snapshots on a pserver's blocks: given these events, exactly these effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.rounds_values import Pull
from flightedl.domain.exactly_once.accumulation import missing_places
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.pserver.block_values import (
    AddGradient,
    BlocksDue,
    CopyBlocks,
    Effect,
    EmptyRound,
    Extent,
    Joined,
    Needs,
    Push,
    Pushed,
    ReleasedBlocks,
    SpanPlace,
    Split,
    Unmovable,
    Update,
)
from flightedl.domain.pserver.blocks import BlockProtocol, around
from flightedl.errors import CorruptError, MessageError
from flightedl.messages.control import ViewMember, ViewReply, ViewRequest
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader

#: Numbers of the blocks: two spans.
FIRST, SECOND = range(10, 13), range(20, 22)
BLOCKS = [*FIRST, *SECOND]
TASK_SIZE = 1000


def batch(number: int) -> Batch:
    return Batch(0, 0, number)


class Span(SpanPlace):
    """Return the batches in the values of each block, and in the sum of the open round."""

    __slots__ = ("held", "protocol", "values")

    def __init__(self, numbers: range, protocol: BlockProtocol) -> None:
        super().__init__(numbers)
        self.protocol = protocol
        self.values: list[list[Batch]] = [[] for _ in numbers]
        self.held: list[Batch] = []

    @property
    def rounds(self) -> BlockRounds:
        return self.protocol.span(self.numbers.start).rounds

    @property
    def updates(self) -> int:
        return self.protocol.span(self.numbers.start).updates

    def parts(self, into: Sequence[range]) -> list[Span]:
        parts = []
        for numbers in into:
            part = Span(numbers, self.protocol)
            part.values = [self.values[number - self.numbers.start] for number in numbers]
            part.held = list(self.held)
            parts.append(part)
        return parts


class Bench:
    """A pserver's blocks, members that push to them, and a store that carries out the effects."""

    def __init__(self, mode: Mode, *members: int, first_round: int = 0, is_whole: bool = False) -> None:
        self.protocol = BlockProtocol([Extent(FIRST, is_whole), Extent(SECOND)], mode)
        spans = [Span(FIRST, self.protocol), Span(SECOND, self.protocol)]
        self.spans = {number: span for span in spans for number in span.numbers}
        self.serial = 0
        self.effects: list[Effect] = []
        #: Number of the newest cut, and block -> (version, updates, batches) of its copy.
        self.newest_cut = 0
        self.copies: dict[int, tuple[int, int, list[Batch]]] = {}
        #: Cut -> the same, for all cuts.
        self.copies_of: dict[int, dict[int, tuple[int, int, list[Batch]]]] = {}
        self.due: set[int] = set()
        self.view(*members, first_round=first_round)

    def split(self, first: int, into: Sequence[range]) -> None:
        self.carry_out_split(self.protocol.split(first, into))

    def carry_out_split(self, split: Split) -> None:
        if len(split.into) > 1:
            for part in self.spans[split.span].parts(split.into):
                self.spans.update(dict.fromkeys(part.numbers, part))

    def restore(self, applied: AppliedBatches, blocks: dict[int, tuple[int, int]]) -> None:
        for split in self.protocol.restore(applied, blocks):
            self.carry_out_split(split)

    def view(self, *members: int, first_round: int = 0, mode: Mode | None = None, switch_round: int = 0) -> ViewReply:
        self.serial += 1
        known = {member.member: member.first_round for member in self.protocol._view.members}
        request = ViewRequest(
            plan_hash="p",
            master_generation=1,
            serial=self.serial,
            members=[
                ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=known.get(m, first_round))
                for m in members
            ],
            mode=None if mode is None else mode.to_json(),
            switch_round=switch_round,
        )
        taken = self.protocol.apply_view(request)
        for first, effects in taken.effects:
            self.carry_out(self.spans[first], effects, ())
        return taken.reply

    def span(self, number: int) -> Span:
        return self.spans[number]

    def push(
        self,
        member: int,
        *batches: int,
        base: int = 0,
        at: int = FIRST.start,
        weight: float = 1.0,
        has_gradient: bool = True,
        step: int = 0,
    ) -> Pushed | None:
        """Push to the span that contains block ``at``; return None if it was split."""
        span = self.span(at)
        first = span.numbers.start
        push = Push(f"t{member}", member, member, [(batch(n), TASK_SIZE) for n in batches], weight, step)
        needs = self.protocol.prepare(first, push, base, has_gradient=has_gradient)
        self.carry_out(span, needs.copies, ())
        pushed = self.protocol.push(first, push, base, has_gradient=has_gradient)
        if isinstance(pushed, Split):
            self.carry_out_split(pushed)
            return None
        updates = [effect for effect in pushed.effects if isinstance(effect, Update)]
        assert needs.has_update or not updates, "memory for an update was not requested"
        self.carry_out(span, pushed.effects, [batch(n) for n in batches])
        return pushed

    def push_all(self, member: int, *batches: int, base: int | None = 0, at: range = FIRST) -> set[Outcome]:
        """Push to some blocks, separately if they are in different spans; without a base, use the version of each."""
        outcomes: set[Outcome] = set()
        number = at.start
        while number < at.stop:
            span = self.span(number)
            wanted = range(number, min(span.numbers.stop, at.stop))
            if wanted != span.numbers:
                self.split(span.numbers.start, around(span.numbers, wanted))
                continue
            present = span.rounds.version if base is None else base
            if (pushed := self.push(member, *batches, base=present, at=number)) is not None:
                outcomes.add(pushed.outcome)
                number = span.numbers.stop
        return outcomes

    def carry_out(self, span: Span, effects: Sequence[Effect], pushed: Sequence[Batch]) -> None:
        self.effects += effects
        for effect in effects:
            match effect:
                case AddGradient(is_first=is_first):
                    span.held = [*([] if is_first else span.held), *pushed]
                case Update():
                    new = span.held if effect.is_of_round else pushed
                    assert sorted(new) == sorted(each for each, _ in effect.batches)
                    for block_values in span.values:
                        block_values.extend(new)
                case CopyBlocks(cut, numbers, version, updates):
                    for number in numbers:
                        values = span.values[number - span.numbers.start]
                        assert number not in self.copies_of[cut], "a block is copied twice"
                        self.copies_of[cut][number] = (version, updates, list(values))
                        if cut == self.newest_cut:
                            self.due.discard(number)
                case BlocksDue(cut, numbers):
                    if cut == self.newest_cut:
                        self.due.update(numbers)

    def cut(self, at_round: int | None = None) -> int:
        self.newest_cut, due = self.protocol.begin_cut(at_round)
        self.copies = self.copies_of[self.newest_cut] = {}
        self.due = set(due)
        return self.newest_cut

    def copy(self, number: int, cut: int = 0) -> bool:
        span = self.spans[number]
        copy = self.protocol.copy(cut or self.newest_cut, number)
        if copy is not None:
            self.carry_out(span, [copy], ())
        return copy is not None

    def release(self, numbers: range) -> tuple[ReleasedBlocks, list[list[Batch]]] | Unmovable:
        """Release blocks, with their values."""
        released = self.protocol.release(numbers)
        if isinstance(released, Split):
            self.carry_out_split(released)
            released = self.protocol.release(numbers)
        if isinstance(released, Unmovable):
            return released
        assert isinstance(released, ReleasedBlocks)
        values = self.spans[numbers.start].values
        for number in numbers:
            del self.spans[number]
        return released, values

    def adopt(self, released: ReleasedBlocks, values: list[list[Batch]]) -> Unmovable | None:
        unmovable = self.protocol.adopt(released)
        if unmovable is None:
            span = Span(released.numbers, self.protocol)
            span.values = values
            self.spans = dict(sorted([*self.spans.items(), *((number, span) for number in released.numbers)]))
        return unmovable

    def values(self, number: int) -> list[int]:
        span = self.span(number)
        return sorted(each.batch for each in span.values[number - span.numbers.start])

    def versions(self) -> list[int]:
        return list(self.protocol.versions().values())

    def has(self, block: int, number: int) -> bool:
        return self.protocol.applied().has(block, batch(number))


@pytest.fixture(autouse=True)
def bench_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test checks all invariants at its end."""
    made: list[Bench] = []
    init = Bench.__init__

    def remember(self: Bench, *arguments: object, **more: object) -> None:
        init(self, *arguments, **more)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Bench, "__init__", remember)
    yield
    for bench in made:
        bench.protocol.check()


# pushes


def test_a_gradient_waits_in_its_round_and_the_last_one_closes_it():
    bench = Bench(Sync(), 1, 2)
    first = bench.push(1, 7, weight=30.0)
    assert first == Pushed(Outcome.ACCEPTED, 0, [AddGradient(batch(7), 30.0, True, False)], b"", 1)
    last = bench.push(2, 8, weight=10.0)
    update = Update(0, 1, 0, [(batch(7), TASK_SIZE), (batch(8), TASK_SIZE)], True, 1 / 40, is_mean=True)
    assert last == Pushed(Outcome.ACCEPTED, 1, [AddGradient(batch(8), 10.0, False, False), update], b"", 1, True, True)
    assert bench.values(11) == [7, 8]
    assert bench.versions() == [1, 1, 1, 0, 0]


def test_a_sum_of_gradients_is_not_divided():
    bench = Bench(Sync(reduce="sum"), 1)
    pushed = bench.push(1, 0, weight=30.0)
    assert pushed is not None
    add, update = pushed.effects
    assert add == AddGradient(batch(0), 1.0, True, False)
    assert isinstance(update, Update)
    assert update.scale == 1.0


def test_ordered_gradients_are_kept_separately():
    bench = Bench(Sync(deterministic=True), 1, 2)
    pushed = bench.push(1, 0)
    assert pushed is not None
    assert pushed.effects == [AddGradient(batch(0), 1.0, True, True)]


def test_async_applies_at_once_and_reports_the_staleness():
    bench = Bench(Async(staleness_scaled=True), 1, 2)
    bench.push(1, 0)
    pushed = bench.push(2, 1, base=0)
    assert pushed is not None
    assert pushed.effects == [Update(1, 2, 1, [(batch(1), TASK_SIZE)], False, 1.0, 0.5)]
    assert (pushed.follows, pushed.is_ready, pushed.is_news) == (0, True, True)


@pytest.mark.parametrize("mode", [Sync(), Async(), Bounded(staleness=1)], ids=["sync", "async", "bounded"])
def test_a_repeated_push_is_answered_and_not_applied(mode):
    bench = Bench(mode, 1, 2)
    bench.push(1, 0, step=1)
    before = len(bench.effects)
    again = bench.push(1, 0, step=1)
    assert again is not None
    assert again.outcome is Outcome.ALREADY_APPLIED
    assert len(bench.effects) == before
    other = bench.push(2, 0, step=1)
    assert other is not None
    assert other.outcome is Outcome.ALREADY_APPLIED
    assert bench.values(10) == [0]


def test_an_unknown_sender_changes_nothing_and_nothing_is_prepared():
    bench = Bench(Sync(), 1)
    bench.cut()
    for push in (
        Push("t9", 9, 9, [(batch(0), 1)]),
        Push("t1", 8, 1, [(batch(0), 1)]),
        Push("t2", 1, 1, [(batch(0), 1)]),
    ):
        assert bench.protocol.prepare(10, push, 0, has_gradient=True) == Needs()
        assert bench.protocol.push(10, push, 0, has_gradient=True) == Pushed(Outcome.NOT_MEMBER, 0)
    assert not bench.has(10, 0)


def test_a_batch_refused_by_a_round_is_not_marked():
    bench = Bench(Sync(), 1)
    bench.push(1, 0)
    late = bench.push(1, 1, base=0)
    assert late is not None
    assert (late.outcome, late.follows, late.version) == (Outcome.STALE, None, 1)
    assert not any(bench.has(block, 1) for block in FIRST)
    with pytest.raises(MessageError, match="future"):
        bench.push(1, 1, base=5)
    assert not bench.has(10, 1)
    fresh = bench.push(1, 1, base=1)
    assert fresh is not None
    assert fresh.outcome is Outcome.ACCEPTED


def test_a_refused_sum_is_unmarked_completely():
    bench = Bench(Async(), 1)
    ahead = bench.push(1, 0, 1, base=4)
    assert ahead is not None
    assert ahead.outcome is Outcome.STALE
    assert not any(bench.has(block, number) for block in FIRST for number in (0, 1))


def test_a_late_gradient_is_added_if_a_round_may_close_without_it():
    bench = Bench(Sync(backup=1), 1, 2)
    bench.push(1, 0)
    late = bench.push(2, 1, base=0)
    assert late is not None
    assert (late.outcome, late.version) == (Outcome.ACCEPTED, 1)
    bench.push(1, 2, base=1)
    assert bench.values(10) == [0, 1, 2]


def test_an_arrival_without_gradient_counts_and_adds_nothing():
    bench = Bench(Sync(), 1, 2)
    bench.push(1, 0)
    arrived = bench.push(2, 1, has_gradient=False)
    assert arrived is not None
    assert (arrived.outcome, arrived.version) == (Outcome.ACCEPTED, 1)
    assert bench.values(10) == [0]
    assert bench.has(10, 1)


def test_a_round_without_any_gradient_only_moves_the_version():
    bench = Bench(Sync(), 1)
    pushed = bench.push(1, 0, has_gradient=False)
    assert pushed is not None
    assert pushed.effects == [EmptyRound(0, 1)]
    assert bench.span(10).updates == 0


@pytest.mark.parametrize("mode", [Sync(), Async(), Bounded(staleness=1)], ids=["sync", "async", "bounded"])
def test_versions_count_rounds_or_pushes_and_updates_count_those_with_a_gradient(mode: Mode):
    bench = Bench(mode, 1)
    for number in range(6):
        for at in (FIRST.start, SECOND.start):
            bench.push(1, number, base=number, at=at, has_gradient=at == FIRST.start or number == 4, step=number)
            bench.push(1, number, base=number, at=at, has_gradient=False, step=number)
    assert bench.versions() == [6] * 5
    assert (bench.span(FIRST.start).updates, bench.span(SECOND.start).updates) == (6, 1)
    (update,) = [each for each in bench.effects if isinstance(each, Update) and each.number == 0][1:]
    assert (update.from_version, update.to_version) == (4, 5)
    moved = bench.protocol.release(SECOND)
    assert isinstance(moved, ReleasedBlocks)
    assert (moved.version, moved.updates) == (6, 1)


def test_a_push_names_the_memory_that_it_needs():
    span_of = {mode: Bench(mode, 1, 2) for mode in (Sync(), Sync(deterministic=True), Async())}
    push = Push("t1", 1, 1, [(batch(0), 1)])
    needs = {mode: bench.protocol.prepare(10, push, 0, has_gradient=True) for mode, bench in span_of.items()}
    assert needs == {
        Sync(): Needs(has_sum=True),
        Sync(deterministic=True): Needs(has_sum=True, is_kept=True),
        Async(): Needs(has_update=True),
    }
    alone = Bench(Sync(), 1)
    assert alone.protocol.prepare(10, push, 0, has_gradient=False) == Needs(has_update=True)


# sums


def test_a_block_applies_a_sum_completely_or_reports_the_batches_it_has():
    bench = Bench(Async(), 1, 2)
    assert bench.push_all(1, 0, 1) == {Outcome.ACCEPTED}
    assert bench.values(10) == [0, 1]
    refused = bench.push(2, 1, 2, 3)
    assert refused is not None
    assert (refused.outcome, refused.effects) == (Outcome.PARTLY_APPLIED, ())
    assert missing_places(refused.having, 3) == (1, 2)
    assert bench.values(10) == [0, 1]
    assert bench.push_all(2, 0, 1) == {Outcome.ALREADY_APPLIED}


def test_a_sum_is_one_contribution_to_a_round_and_waits_in_it_with_all_its_batches():
    bench = Bench(Sync(push_every=2), 1, 2)
    bench.push(1, 0, 1)
    assert {held for held, _ in bench.span(10).rounds.held} == {batch(0), batch(1)}
    assert bench.values(10) == []
    bench.push(2, 2, 3)
    assert (sorted(bench.values(10)), bench.versions()[0]) == ([0, 1, 2, 3], 1)
    late = bench.push(1, 4, 5, base=0)
    assert late is not None
    assert late.outcome is Outcome.STALE
    assert not any(bench.has(10, number) for number in (4, 5))


def test_the_sender_of_a_refused_sum_has_arrived_and_pushes_the_rest_to_the_next_round():
    bench = Bench(Sync(push_every=2), 1, 2)
    bench.push(1, 0)
    bench.push(2, 1)
    refused = bench.push(1, 1, 2, base=1)
    assert refused is not None
    assert (refused.outcome, refused.effects) == (Outcome.PARTLY_APPLIED, [])
    assert missing_places(refused.having, 2) == (1,)
    assert bench.span(10).rounds.waits_for() == [2]
    bench.push(2, 3, base=1)
    assert (sorted(bench.values(10)), bench.versions()[0]) == ([0, 1, 3], 2)
    again = bench.push(1, 1, 2, base=1)
    assert again is not None
    assert (again.outcome, bench.span(10).rounds.waits_for()) == (Outcome.PARTLY_APPLIED, [1, 2])
    bench.push(1, 2, base=2)
    bench.push(2, 4, base=2)
    assert (sorted(bench.values(10)), bench.versions()[0]) == ([0, 1, 2, 3, 4], 3)


def test_a_snapshot_leaves_out_every_batch_of_a_waiting_sum():
    bench = Bench(Sync(push_every=2), 1, 2)
    cut = bench.cut()
    bench.push(1, 0, 1)
    for block in BLOCKS:
        bench.copy(block)
    applied = bench.protocol.end_cut(cut)
    assert applied is not None
    assert not any(applied.has(10, batch(number)) for number in (0, 1))


def test_a_mode_without_sums_refuses_those_of_members():
    bench = Bench(Sync(), 1)
    with pytest.raises(MessageError, match="accepts no sums"):
        bench.push(1, 0, 1)
    stranger = bench.push(2, 0, 1)
    assert stranger is not None
    assert stranger.outcome is Outcome.NOT_MEMBER
    assert not bench.has(10, 0)


def test_a_header_names_all_batches_of_a_sum():
    identity = BatchIdentity(epoch=2, task=3, batch=4, batch_count=9)
    other = BatchIdentity(epoch=2, task=3, batch=5, batch_count=9)
    header = PushHeader(
        trainer="t", generation=7, plan_hash="p", member=6, identity=identity, further=[other], weight=8.0, rows=1
    )
    assert Push.of(header) == Push("t", 7, 6, [(Batch(2, 3, 4), 9), (Batch(2, 3, 5), 9)], 8.0, 0)


# spans


def test_differing_blocks_are_separated_and_answer_individually():
    bench = Bench(Async(), 1, 2)
    assert bench.push_all(1, 0, at=range(11, 12)) == {Outcome.ACCEPTED}
    assert [span.numbers for span in bench.protocol.spans] == [*(range(n, n + 1) for n in FIRST), SECOND]
    assert bench.push_all(2, 0) == {Outcome.ACCEPTED, Outcome.ALREADY_APPLIED}
    assert [bench.values(number) for number in FIRST] == [[0]] * 3


def test_a_span_is_split_only_into_several():
    bench = Bench(Async())
    into = [range(10, 12), range(12, 13)]
    assert bench.protocol.split(10, into) == Split(10, into)
    spans = bench.protocol.spans
    assert bench.protocol.split(10, into[:1]) == Split(10, into[:1])
    assert bench.protocol.spans is spans
    assert [span.numbers for span in spans] == [*into, SECOND]
    bench.protocol.check()


def test_blocks_with_the_same_history_stay_together():
    bench = Bench(Async(), 1, 2)
    bench.push_all(1, 0, at=range(10, 12))
    assert [span.numbers for span in bench.protocol.spans] == [range(10, 12), range(12, 13), SECOND]


def test_equal_restored_blocks_form_spans():
    bench = Bench(Async())
    applied = AppliedBatches(BLOCKS)
    applied.mark([12], batch(0), TASK_SIZE)
    bench.restore(applied, {10: (3, 2), 11: (4, 2), 12: (4, 2), 20: (4, 2), 21: (4, 2)})
    bench.view(1)
    assert [span.numbers for span in bench.protocol.spans] == [range(10, 11), range(11, 13), SECOND]
    assert bench.push(1, 0, base=4, at=11) is None, "they have different batches"
    assert [span.numbers for span in bench.protocol.spans][1:3] == [range(11, 12), range(12, 13)]
    assert bench.push(1, 0, base=4, at=20) is not None, "these have the same"


def test_a_single_block_has_all_batches_of_a_sum_too():
    bench = Bench(Async(), 1)
    bench.push_all(1, 0, 1, at=range(11, 12))
    assert [bench.has(11, number) for number in (0, 1)] == [True, True]
    again = bench.push(1, 1, base=1, at=11)
    assert again is not None
    assert again.outcome is Outcome.ALREADY_APPLIED


def test_parts_of_a_span_continue_its_open_round():
    bench = Bench(Sync(), 1, 2)
    bench.push(1, 0)
    bench.push_all(2, 1, at=range(10, 12))
    assert bench.versions() == [1, 1, 0, 0, 0]
    assert bench.values(12) == []
    bench.push_all(2, 1, at=range(12, 13))
    assert [bench.values(number) for number in FIRST] == [[0, 1]] * 3
    assert [span.updates for span in bench.protocol.spans] == [1, 1, 0]


def test_a_span_may_be_split_while_a_push_looks_for_its_blocks():
    """Restored blocks may have the same version but different batches."""
    bench = Bench(Async())
    applied = AppliedBatches(BLOCKS)
    applied.mark([11], batch(0), TASK_SIZE)
    bench.restore(applied, dict.fromkeys(BLOCKS, (3, 2)))
    bench.view(1)
    assert bench.push(1, 0, base=3) is None
    assert bench.push_all(1, 0, base=3) == {Outcome.ACCEPTED, Outcome.ALREADY_APPLIED}
    assert [bench.values(number) for number in FIRST] == [[0], [], [0]]


# blocks that are copied as one


def whole_bench(mode: Mode, *members: int) -> Bench:
    """The first span is copied as one."""
    return Bench(mode, *members, is_whole=True)


def test_a_span_to_copy_as_one_is_copied_by_the_first_push_or_by_the_thread():
    bench = whole_bench(Async(), 1)
    cut = bench.cut()
    assert bench.due == {*BLOCKS}
    bench.push(1, 0)
    assert [bench.copies[block] for block in FIRST] == [(0, 0, [])] * 3, "before it has changed"
    assert bench.due == {*SECOND}
    copy = bench.protocol.copy(cut, 20)
    assert copy is not None
    assert list(copy.numbers) == [20]
    other = whole_bench(Async(), 1)
    cut = other.cut()
    copy = other.protocol.copy(cut, 11)
    assert copy is not None
    assert list(copy.numbers) == [*FIRST], "whichever of its blocks is asked for"
    assert other.protocol.copy(cut, 10) is None


def test_a_span_to_copy_as_one_is_due_at_its_round():
    bench = whole_bench(Sync(), 1)
    bench.cut(at_round=1)
    assert not bench.due
    bench.push(1, 0)
    assert bench.due == {*FIRST}


def test_a_span_to_copy_as_one_is_split_when_it_is_restored_and_not_later():
    bench = whole_bench(Async())
    applied = AppliedBatches(BLOCKS)
    applied.mark([12], batch(0), TASK_SIZE)
    bench.restore(applied, dict.fromkeys(BLOCKS, (3, 2)))
    assert [span.numbers for span in bench.protocol.spans] == [range(10, 12), range(12, 13), SECOND]
    bench.protocol.check()


# pulls


def test_pulls_are_ready_wait_or_are_refused():
    bench = Bench(Sync(), 1, 2)
    protocol = bench.protocol
    bench.push(1, 0)
    assert [protocol.pull(11, member, 1) for member in (0, 1, 9)] == [Pull.WAIT, Pull.WAIT, Pull.NOT_MEMBER]
    bench.push(2, 1)
    assert [protocol.pull(11, member, 1) for member in (0, 1)] == [Pull.READY] * 2


@pytest.mark.parametrize(("mode", "follows"), [(Sync(), 5), (Async(), 0), (Bounded(staleness=1), 0)])
def test_each_mode_determines_the_version_after_a_push(mode, follows):
    assert mode.version_after(4) == follows


# views


def test_a_round_continues_without_members_that_leave():
    bench = Bench(Sync(), 1, 2)
    bench.push(1, 0)
    assert bench.view(1).refused == []
    assert bench.values(10) == [0]
    assert bench.versions() == [1, 1, 1, 0, 0]
    assert bench.protocol.members == [1]


def test_a_member_is_refused_if_one_of_its_rounds_is_over():
    bench = Bench(Sync(), 1)
    bench.push(1, 0)
    reply = bench.view(1, 2, first_round=0)
    assert (reply.refused, reply.highest_open_round) == ([2], 1)
    assert bench.view(1, 2, first_round=1).refused == []


def test_an_older_view_changes_nothing():
    bench = Bench(Sync(), 1)
    bench.serial = -1
    assert bench.view(2).outdated
    assert bench.protocol.members == [1]


def test_a_repeated_view_does_nothing():
    bench = Bench(Sync(), 1)
    bench.serial -= 1
    bench.view(1)
    member = ViewMember(trainer="t1", generation=1, member=1, first_round=0)
    request = ViewRequest(plan_hash="p", master_generation=1, serial=bench.serial, members=[member])
    taken = bench.protocol.apply_view(request)
    assert (list(taken.effects), taken.reply.refused) == ([], [])


def test_a_member_joins_at_the_slowest_clock_and_a_mode_begins_after_every_version():
    bench = Bench(Bounded(staleness=9), 1)
    for number in range(3):
        bench.push(1, number, base=number, step=1)
        bench.push(1, number, base=number, step=1, at=SECOND.start)
    assert bench.view(1, 2, first_round=5).highest_open_round == 1
    assert bench.view(3, mode=Sync(), switch_round=2, first_round=2).highest_open_round == 3


def test_a_mode_begins_at_one_version_in_all_blocks():
    bench = Bench(Async(), 1)
    bench.push(1, 0)
    bench.push(1, 1, base=1)
    late = bench.view(2, mode=Sync(), switch_round=1, first_round=1)
    assert (late.refuses_mode, late.highest_open_round) == (True, 2)
    assert bench.protocol.members == []
    assert not bench.view(2, mode=Sync(), switch_round=2, first_round=2).refuses_mode
    assert bench.versions() == [2] * 5
    assert bench.protocol.is_synchronous
    pushed = bench.push(2, 2, base=2)
    assert pushed is not None
    assert pushed.follows == 3


def test_a_change_of_the_mode_closes_open_rounds_in_the_old_one():
    bench = Bench(Sync(), 1, 2)
    bench.push(1, 0, weight=4.0)
    bench.effects.clear()
    assert not bench.view(3, mode=Async(), switch_round=3, first_round=3).refuses_mode
    updates = [effect for effect in bench.effects if isinstance(effect, Update)]
    assert [(update.from_version, update.to_version, update.scale) for update in updates] == [(0, 1, 0.25)]
    assert bench.versions() == [3] * 5
    assert bench.values(10) == [0]


def test_gradients_are_weighted_and_divided_as_the_new_mode_requires():
    bench = Bench(Sync(reduce="sum"), 1)
    bench.view(2, mode=Sync(), switch_round=1, first_round=1)
    bench.effects.clear()
    bench.push(2, 0, base=1, weight=4.0)
    add, update = bench.effects
    assert add == AddGradient(batch(0), 4.0, True, False)
    assert isinstance(update, Update)
    assert (update.is_mean, update.scale) == (True, 0.25)


def test_the_rate_depends_on_the_staleness_only_if_the_new_mode_requires_it():
    bench = Bench(Async(), 1)
    bench.view(2, mode=Async(staleness_scaled=True), switch_round=1, first_round=1)
    bench.push(2, 0, base=1)
    bench.push(2, 1, base=1)
    bench.view(3, mode=Async(), switch_round=3, first_round=3)
    bench.push(3, 2, base=3)
    bench.push(3, 3, base=3)
    assert [effect.rate_factor for effect in bench.effects if isinstance(effect, Update)] == [1.0, 0.5, 1.0, 1.0]


def test_the_first_view_determines_the_mode_of_blocks():
    bench = Bench(Async())
    bench.protocol._view = type(bench.protocol._view)(Async())
    bench.view(1, mode=Sync())
    assert bench.protocol.mode == Sync()
    pushed = bench.push(1, 0)
    assert pushed is not None
    assert pushed.version == 1


# first values


def test_newer_initial_values_replace_older_ones_but_never_trained_ones():
    bench = Bench(Async(), 1)
    protocol = bench.protocol
    for election, is_taken in ((5, True), (5, True), (7, True), (6, False)):
        assert protocol.initialize(10, election) == is_taken
    assert (protocol.initialized_count(5), protocol.initialized_count(7)) == (0, 1)
    bench.push(1, 0)
    assert not protocol.initialize(10, 8)
    assert protocol.initialize(20, 8)


# snapshots


def test_a_due_block_is_copied_before_it_changes():
    bench = Bench(Async(), 1)
    bench.push(1, 0)
    bench.cut()
    assert bench.due == {*BLOCKS}
    bench.push(1, 1, base=1)
    assert bench.copies == dict.fromkeys(FIRST, (1, 1, [batch(0)]))
    assert [bench.copy(block) for block in BLOCKS] == [False, False, False, True, True]


def test_a_block_is_due_when_its_round_opens_and_waiting_gradients_are_not_in_it():
    bench = Bench(Sync(), 1, 2)
    cut = bench.cut(at_round=1)
    bench.push(1, 0)
    bench.push(2, 1)
    assert bench.due == {*FIRST}
    bench.push(1, 2, base=1)
    assert bench.copy(10)
    bench.push(2, 3, base=1)
    assert {copy[:2] for copy in bench.copies.values()} == {(1, 1)}
    bench.view(1, 2, 3, first_round=3)
    for member in (1, 2):
        bench.push(member, member - 1, at=SECOND.start)
    for block in SECOND:
        bench.copy(block)
    applied = bench.protocol.end_cut(cut)
    assert applied is not None
    for block in BLOCKS:
        assert [applied.has(block, batch(n)) for n in range(4)] == [True, True, False, False]


def test_concurrent_cuts_each_get_every_block_at_their_own_time():
    bench = Bench(Sync(), 1)
    at_once, later = bench.cut(), bench.cut(at_round=1)
    assert not bench.due
    bench.push(1, 0)
    assert bench.copies_of[at_once] == dict.fromkeys(FIRST, (0, 0, [])), "before the first update"
    assert bench.due == {*FIRST}
    bench.push(1, 1, base=1)
    assert bench.copies_of[later] == dict.fromkeys(FIRST, (1, 1, [batch(0)])), "before the second"
    bench.push(1, 0, at=SECOND.start)
    assert [bench.copy(block, at_once) for block in BLOCKS] == [False] * 5, "the pushes have copied all of them"
    assert [bench.copy(block, later) for block in BLOCKS] == [False, False, False, True, True]
    assert bench.copies_of[at_once].keys() == bench.copies_of[later].keys() == {*BLOCKS}
    before, after = bench.protocol.end_cut(at_once), bench.protocol.end_cut(later)
    assert before is not None
    assert after is not None
    for block in BLOCKS:
        assert [before.has(block, batch(n)) for n in (0, 1)] == [False, False]
        assert [after.has(block, batch(n)) for n in (0, 1)] == [True, False]


def test_one_push_copies_blocks_for_all_cuts_that_lack_them():
    bench = Bench(Async(), 1)
    one, other = bench.cut(), bench.cut()
    assert bench.copy(10, one)
    bench.push(1, 0)
    assert bench.copies_of[one].keys() == bench.copies_of[other].keys() == {*FIRST}
    assert {copy[2] == [] for cut in (one, other) for copy in bench.copies_of[cut].values()} == {True}


def test_a_dropped_cut_is_invalid_and_the_other_continues():
    bench = Bench(Async(), 1)
    old, new = bench.cut(), bench.cut()
    bench.protocol.drop_cut(old)
    assert bench.protocol.end_cut(old) is None
    for block in BLOCKS:
        assert not bench.copy(block, old)
        assert bench.copy(block, new)
    assert bench.protocol.end_cut(new) is not None
    assert not bench.copy(10, new)


def test_a_dropped_snapshot_takes_no_more_memory():
    bench = Bench(Async(), 1)
    bench.protocol.drop_cut(bench.cut())
    bench.push(1, 0)
    assert not bench.copies


# blocks that move


def moved(source: Bench, target: Bench, numbers: range) -> None:
    found = source.release(numbers)
    assert not isinstance(found, Unmovable), found
    assert target.adopt(*found) is None


class Other(Bench):
    """Another pserver, which has no blocks yet."""

    def __init__(self, mode: Mode, *members: int, first_round: int = 0) -> None:
        super().__init__(mode, *members, first_round=first_round)
        for numbers in (FIRST, SECOND):
            assert not isinstance(self.release(numbers), Unmovable)


@pytest.mark.parametrize("mode", [Sync(), Async(), Bounded(staleness=1)])
def test_moved_blocks_continue_as_if_they_had_not_moved(mode):
    source, target = Bench(mode, 1, 2), Other(mode, 1, 2)
    for member in (1, 2):
        source.push(member, member, base=0 if source.protocol.is_synchronous else member - 1, step=1)
    version = source.span(10).rounds.version
    moved(source, target, range(11, 13))
    assert [span.numbers for span in source.protocol.spans] == [range(10, 11), SECOND]
    assert [span.numbers for span in target.protocol.spans] == [range(11, 13)]
    again = target.push(1, 1, base=version, at=11, step=1)
    assert again is not None
    assert again.outcome is Outcome.ALREADY_APPLIED
    for bench, at in ((source, 10), (target, 11)):
        for member in (1, 2):
            bench.push(member, 2 + member, base=version, at=at, step=2)
        assert bench.span(at).rounds.clocks == source.span(10).rounds.clocks
    assert target.values(11) == source.values(10) == [1, 2, 3, 4]
    assert (target.span(11).updates, target.span(11).rounds.version) == (
        source.span(10).updates,
        source.span(10).rounds.version,
    )
    moved(target, source, range(11, 13))
    assert target.protocol.block_count == 0
    assert source.values(12) == [1, 2, 3, 4]
    assert source.has(12, 4)


def test_the_state_that_is_sent_names_the_batches_of_the_blocks():
    source, target = Bench(Async(), 1), Other(Async(), 1)
    source.push(1, 0)
    sent = source.protocol.state_of(FIRST)
    assert target.adopt(sent, [source.span(number).values[number - FIRST.start] for number in FIRST]) is None
    again = target.push(1, 0, at=FIRST.start)
    assert again is not None
    assert again.outcome is Outcome.ALREADY_APPLIED
    assert target.values(10) == [0]


def test_a_block_moves_only_at_the_edge_of_a_round():
    source, target = Bench(Sync(), 1, 2), Other(Sync(), 1, 2)
    source.push(1, 0)
    assert source.release(range(10, 11)) is Unmovable.IN_ROUND
    assert [span.numbers for span in source.protocol.spans] == [FIRST, SECOND], "nothing was done"
    source.push(2, 1)
    moved(source, target, range(10, 11))
    assert (target.values(10), target.span(10).rounds.version) == ([0, 1], 1)


def test_blocks_that_a_cut_lacks_are_copied_before_a_push_changes_them():
    bench = Bench(Async(), 1)
    bench.cut()
    bench.push(1, 0)
    assert bench.copies == {number: (0, 0, []) for number in FIRST}
    assert bench.due == {*SECOND}
    bench.push(1, 1, base=1)
    assert bench.copies == {number: (0, 0, []) for number in FIRST}, "they are copied once"


def test_blocks_do_not_move_while_they_are_copied_or_between_views():
    source, target = Bench(Async(), 1), Other(Async(), 1)
    cut = source.cut()
    assert source.release(FIRST) is Unmovable.COPIED
    source.protocol.drop_cut(cut)
    found = source.release(FIRST)
    assert not isinstance(found, Unmovable)
    other_cut = target.cut()
    assert target.adopt(*found) is Unmovable.COPIED
    target.protocol.drop_cut(other_cut)
    target.view(1, 2)
    assert target.adopt(*found) is Unmovable.VIEW
    source.view(1, 2)
    assert source.adopt(*found) is Unmovable.VIEW, "these would have to wait for member 2, too"


def test_a_range_of_absent_blocks_is_not_released():
    bench = Bench(Async(), 1)
    for numbers in (range(12, 14), range(9, 11), range(10, 21)):
        with pytest.raises(MessageError, match="are not in one span"):
            bench.protocol.release(numbers)
    found = bench.release(range(10, 11))
    assert not isinstance(found, Unmovable)
    bench.adopt(*found)
    with pytest.raises(MessageError, match="already here"):
        bench.adopt(*found)


def test_adjacent_spans_are_joined_when_their_states_have_become_equal():
    protocol = BlockProtocol([Extent(range(10, 16), True), Extent(range(16, 20), True), Extent(SECOND)], Async())
    protocol.apply_view(
        ViewRequest(
            plan_hash="p",
            master_generation=1,
            serial=1,
            members=[ViewMember(trainer="t", generation=1, member=1, first_round=0)],
        )
    )

    def push(first: int, number: int) -> None:
        assert isinstance(
            protocol.push(first, Push("t", 1, 1, [(batch(number), TASK_SIZE)]), 0, has_gradient=True), Pushed
        )

    assert protocol.join(10, 9) is None, "no block precedes these"
    assert protocol.join(20, 9) is None, "blocks of parameters are copied one by one"
    push(10, 0)
    assert protocol.join(16, 9) is None
    push(16, 1)
    assert protocol.join(16, 9) is None, "the versions are equal, the batches are not"
    push(10, 1)
    push(16, 0)
    cut = protocol.begin_cut(None).cut
    assert protocol.join(16, 9) is None, "a cut may have one of them"
    protocol.drop_cut(cut)
    assert protocol.join(16, 3) == Joined(10, range(16, 19))
    assert [span.numbers for span in protocol.spans] == [range(10, 19), range(19, 20), SECOND]
    push(10, 2)
    assert protocol.join(19, 3) is None
    push(19, 2)
    assert protocol.join(19, 3) == Joined(10, range(19, 20))
    assert [(span.numbers, span.updates) for span in protocol.spans] == [(range(10, 20), 3), (SECOND, 0)]
    protocol.check()
    protocol.split(10, [range(10, 13), range(13, 20)])
    assert protocol.join(13, 2) == Joined(13, range(11, 13))
    assert [span.numbers for span in protocol.spans] == [range(10, 11), range(11, 20), SECOND]
    protocol.check()


def test_moved_blocks_accept_the_same_initial_values_as_before():
    source, target = Bench(Async(), 1), Other(Async(), 1)
    assert source.protocol.initialize(10, 7)
    moved(source, target, range(10, 12))
    assert [target.protocol.initialize(10, election) for election in (6, 8)] == [False, True]
    assert target.protocol.initialize(11, 6)
    restored = Bench(Async(), 1)
    restored.restore(AppliedBatches(BLOCKS), dict.fromkeys(BLOCKS, (0, 0)))
    restored.view(1)
    target.view(1)
    moved(restored, target, SECOND)
    assert not target.protocol.initialize(20, 9)


# from a checkpoint


def test_restored_blocks_continue_each_at_its_version():
    bench = Bench(Sync())
    applied = AppliedBatches(BLOCKS)
    applied.mark(BLOCKS, batch(0), TASK_SIZE)
    states = {10: (4, 3), 11: (4, 3), 12: (5, 4), 20: (4, 3), 21: (4, 3)}
    bench.restore(applied, states)
    assert bench.versions() == [4, 4, 5, 4, 4]
    assert [len(span.numbers) for span in bench.protocol.spans] == [2, 1, 2]
    assert not bench.protocol.initialize(10, 9)
    bench.view(1, first_round=5)
    assert bench.versions() == [5] * 5
    again, new = bench.push(1, 0, base=5), bench.push(1, 1, base=6)
    assert again is not None
    assert new is not None
    assert (again.outcome, new.outcome) == (Outcome.ALREADY_APPLIED, Outcome.ACCEPTED)
    (update,) = [effect for effect in bench.effects if isinstance(effect, Update)]
    assert (update.number, update.from_version, update.to_version) == (3, 6, 7)


def test_incomplete_sets_of_blocks_are_refused():
    bench = Bench(Sync())
    every = dict.fromkeys(BLOCKS, (1, 1))
    with pytest.raises(CorruptError):
        bench.protocol.restore(AppliedBatches(BLOCKS[:4]), every)
    with pytest.raises(CorruptError):
        bench.protocol.restore(AppliedBatches(BLOCKS), {10: (1, 1)})


def test_finished_epochs_are_sealed():
    bench = Bench(Async(), 1)
    for at in (FIRST.start, SECOND.start):
        bench.protocol.push(at, Push("t1", 1, 1, [(Batch(0, 0, 0), 1)]), 0, has_gradient=False)
    bench.protocol.set_task_counts([(0, 1)])
    assert bench.protocol.applied().completed_task_count(0) == 1
    with pytest.raises(MessageError):
        bench.protocol.set_task_counts([(1, 0)])


def test_restored_buckets_know_up_to_which_epoch_they_have_all_batches():
    def restored() -> Bench:
        bench = Bench(Async(), is_whole=True)
        applied = AppliedBatches(BLOCKS)
        applied.mark(BLOCKS, Batch(0, 0, 0), 1)
        bench.restore(applied, dict.fromkeys(BLOCKS, (1, 1)))
        bench.view(1)
        bench.protocol.set_task_counts([(0, 2), (1, 1)], 0)
        return bench

    def push(bench: Bench, epoch: int, task: int = 0) -> int | None:
        updates = []
        for first in (SECOND.start, FIRST.start):
            pushed = bench.protocol.push(first, Push("t1", 1, 1, [(Batch(epoch, task, 0), 1)]), 0, has_gradient=True)
            assert isinstance(pushed, Pushed)
            updates += [effect for effect in pushed.effects if isinstance(effect, Update)]
        return updates[-1].open_epoch

    # The trainer holds batches of epoch 2 while batches of epochs 0 and 1 are repeated.
    bench = restored()
    assert [push(bench, 2), push(bench, 0, 1), push(bench, 2, 1)] == [0, None, 1]
    assert push(bench, 1) is None
    assert push(bench, 2, 2) is None
    # Tasks that were set aside are never done.
    bench = restored()
    bench.protocol.set_task_counts([(1, 1)], 1)
    assert push(bench, 2) == 1
    released = bench.protocol.release(FIRST)
    assert isinstance(released, ReleasedBlocks)
    # What the master has said of another pserver is not true of blocks that were restored here.
    bench = Bench(Async(), 1, is_whole=True)
    bench.protocol.release(FIRST)
    bench.protocol.set_task_counts([(0, 2), (1, 1)], 2)
    assert bench.protocol.adopt(released._replace(view=bench.protocol.view)) is None
    assert push(bench, 2, 1) == 0
    bench.protocol.set_task_counts([(1, 1)], 2)
    assert push(bench, 3) is None, "the master has no more tasks of earlier epochs"


# any order of events


class AnyOrder(RuleBasedStateMachine):
    """Pushes to some blocks, views and copies in any order: values and applied batches always match."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(Sync(), 1, 2, 3)
        #: Cuts in progress, the newest last.
        self.cuts: list[int] = []

    @rule(
        member=st.integers(1, 4),
        number=st.integers(0, 12),
        first=st.sampled_from(BLOCKS),
        length=st.integers(1, 3),
        behind=st.sampled_from((0, 0, 0, 0, 1)),
    )
    def push(self, member: int, number: int, first: int, length: int, behind: int) -> None:
        blocks = FIRST if first in FIRST else SECOND
        for at in range(first, min(first + length, blocks.stop)):
            base = max(self.bench.span(at).rounds.version - behind, 0)
            self.bench.push_all(member, number, base=base, at=range(at, at + 1))

    @rule(member=st.integers(1, 4), number=st.integers(0, 12), blocks=st.sampled_from((FIRST, SECOND)))
    def push_wholly(self, member: int, number: int, blocks: range) -> None:
        self.bench.push_all(member, number, base=None, at=blocks)

    @rule(members=st.sets(st.integers(1, 4)))
    def view(self, members: set[int]) -> None:
        self.bench.view(*members, first_round=self.bench.protocol.highest_open_round())

    @rule(ahead=st.sampled_from((None, 0, 1)))
    def order(self, ahead: int | None) -> None:
        at_round = None if ahead is None else self.bench.protocol.highest_open_round() + ahead
        if len(self.cuts) == 2:
            self.bench.protocol.drop_cut(self.cuts.pop(0))
        self.cuts.append(self.bench.cut(at_round))

    @rule(block=st.sampled_from(BLOCKS))
    def copy(self, block: int) -> None:
        is_due = block in self.bench.due
        if self.cuts and self.cuts[-1] == self.bench.newest_cut:
            assert self.bench.copy(block) == is_due

    @precondition(lambda self: self.cuts)
    @rule(block=st.sampled_from(BLOCKS))
    def copy_for_the_older(self, block: int) -> None:
        self.bench.copy(block, self.cuts[0])

    @precondition(lambda self: any(len(self.bench.copies_of[cut]) == 5 for cut in self.cuts))
    @rule()
    def save(self) -> None:
        cut = next(cut for cut in self.cuts if len(self.bench.copies_of[cut]) == 5)
        self.cuts.remove(cut)
        applied = self.bench.protocol.end_cut(cut)
        assert applied is not None
        for block, (_, _, values) in self.bench.copies_of[cut].items():
            assert [n for n in range(13) if applied.has(block, batch(n))] == sorted(each.batch for each in values)

    @precondition(lambda self: not self.cuts)
    @rule(first=st.sampled_from(BLOCKS), length=st.integers(1, 3))
    def move(self, first: int, length: int) -> None:
        """Move to another pserver and back, with no other event in between."""
        self.bench.protocol.drop_cut(self.bench.newest_cut)
        numbers = range(first, min(first + length, self.bench.span(first).numbers.stop))
        found = self.bench.release(numbers)
        assert (found is Unmovable.IN_ROUND) == (isinstance(found, Unmovable))
        if not isinstance(found, Unmovable):
            assert self.bench.adopt(*found) is None

    @rule(change=st.sampled_from((Sync(), Sync(backup=1), Async(), Bounded(staleness=2))))
    def change_mode(self, change: Mode) -> None:
        if not self.cuts:
            at_round = self.bench.protocol.highest_open_round() + 2
            if change != self.bench.protocol.mode:
                self.bench.view(5, 6, mode=change, switch_round=at_round, first_round=at_round)

    @invariant()
    def batches_and_values_belong_together(self) -> None:
        self.bench.protocol.check()
        applied = self.bench.protocol.applied()
        for span in dict.fromkeys(self.bench.spans.values()):
            for place, block in enumerate(span.numbers):
                waiting = [each for each, _ in span.rounds.held]
                there = sorted(each.batch for each in (*span.values[place], *waiting))
                assert len(set(there)) == len(there), "a batch counts twice"
                assert there == [n for n in range(13) if applied.has(block, batch(n))]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
