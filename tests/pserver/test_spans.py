"""Spans are borrowed from and split, and behave like single blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations

import numpy as np
import pyarrow as pa
import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.model.optimizers import LAMB, SGD, Adam, Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import block_limit, plan_shards, runs_of
from flightedl.domain.pserver.block_values import Update
from flightedl.errors import GradientError, MessageError
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.array_span import ReceivedArray
from flightedl.pserver.stores.interface import Wanted
from flightedl.wire.parts import decode_message, encode_message
from flightedl.wire.rows import OutgoingBlocks, Row, Rows, decode_batch, encode_pieces, encode_rows

from ..wire.encoded import encode_parts

COUNT, SIZE = 5, 16
ALL = range(COUNT)


class Bench:
    """A shard with several tiny parameters, and members that push to it."""

    has_parts = False

    def __init__(
        self, mode: Mode, optimizer: Optimizer | None = None, wire: str = "", members: Sequence[int] = (1, 2)
    ) -> None:
        plan = plan_shards([ParameterSpec(f"p{i}", (SIZE,)) for i in ALL], 1)
        self.shard = Shard(plan, 0, optimizer or SGD(lr=1.0), mode, wire)
        for number in ALL:
            zeros = memoryview(np.zeros(SIZE, np.float32)).cast("B")
            self.shard.initialize(1, Row(number, 0, zeros))
        view = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in members]
        self.shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=view))

    def push(
        self, member: int, batch: int, blocks: range = ALL, gradient: float = -1.0, bases: list[int] | None = None
    ) -> list[tuple[range, int, Outcome]]:
        header = PushHeader(
            trainer=f"t{member}",
            generation=member,
            plan_hash=self.shard.plan_hash,
            member=member,
            identity=BatchIdentity(epoch=0, task=0, batch=batch, batch_count=100),
            weight=1.0,
            rows=len(blocks),
        )
        arrays = [np.full(SIZE, gradient * (number + 1), np.float32) for number in blocks]
        bases = bases or [0] * len(blocks)
        if self.has_parts:
            cuts = [0, *(i for i in range(1, len(blocks)) if bases[i] != bases[i - 1]), len(blocks)]
            sent = [
                OutgoingBlocks(blocks[a:b], bases[a], Outcome.NONE, np.concatenate(arrays[a:b]), ())
                for a, b in pairwise(cuts)
            ]
            values, described, _ = encode_message(sent)
            assert values is not None
            received = bytearray(b"".join(values))
            pushed = self.shard.push(header, decode_message(memoryview(received), described)[0])
            # The stream's next message arrives in the same memory.
            received[:] = b"\xff" * len(received)
        else:
            pushed = self.shard.push_rows(header, decode_batch(encode_rows(list(blocks), bases, arrays)))
        pieces = [one.piece for one in pushed]
        return [(piece.blocks, piece.version, Outcome(piece.outcome)) for piece in pieces]

    def values(self) -> list[tuple[int, float]]:
        """Return (version, value) of each block."""
        pieces, rest = self.shard.read(Wanted(ALL, 0), 0)
        assert not rest
        rows = decode_batch(encode_pieces(pieces))
        return [(rows[i].version, float(rows[i].array(np.float32)[-1])) for i in range(len(rows))]

    def check(self) -> None:
        self.shard._protocol.check()


@pytest.fixture(autouse=True, params=[False, True], ids=["rows", "parts"])
def _way_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Push by rows, or by the parts of a step's messages."""
    monkeypatch.setattr(Bench, "has_parts", request.param)


def test_adjacent_tiny_parameters_form_one_span_with_one_answer() -> None:
    bench = Bench(Async())
    assert bench.push(1, 0) == [(ALL, 1, Outcome.ACCEPTED)]
    assert bench.values() == [(1, float(i + 1)) for i in ALL]
    assert bench.push(2, 0) == [(ALL, 1, Outcome.ALREADY_APPLIED)]
    bench.check()


def test_a_push_of_some_blocks_splits_the_span() -> None:
    bench = Bench(Async())
    bench.push(1, 0)
    assert [p[0] for p in bench.push(1, 1, range(1, 3))] == [range(1, 3)]
    answers = bench.push(1, 1)
    assert [(blocks, outcome == Outcome.ALREADY_APPLIED) for blocks, _, outcome in answers] == [
        (range(1), False),
        (range(1, 3), True),
        (range(3, 5), False),
    ]
    assert bench.values() == [(2, 2.0 * (i + 1)) for i in ALL]
    bench.check()


def test_a_span_split_in_an_open_round_keeps_its_contributions() -> None:
    for mode in (Sync(reduce="sum"), Sync(reduce="sum", deterministic=True)):
        bench = Bench(mode)
        bench.push(1, 0)
        bench.push(2, 1, range(1, 3))
        assert [version for version, _ in bench.values()] == [0, 1, 1, 0, 0]
        bench.push(2, 1)
        assert bench.values() == [(1, 2.0 * (i + 1)) for i in ALL]
        bench.check()


def test_a_gradient_that_waits_for_its_round_outlives_its_message() -> None:
    bench = Bench(Sync(reduce="sum", deterministic=True))
    bench.push(1, 0)
    bench.push(2, 1, gradient=-2.0)
    assert bench.values() == [(1, 3.0 * (i + 1)) for i in ALL]
    bench.check()


def test_rows_with_different_base_versions_are_pushed_separately() -> None:
    bench = Bench(Sync(reduce="sum"))
    bench.push(1, 0)
    bench.push(2, 1, range(1))
    answers = bench.push(2, 1, ALL, bases=[1, 0, 0, 0, 0])
    assert answers[0][2] == Outcome.ALREADY_APPLIED
    assert bench.values() == [(1, 2.0 * (i + 1)) for i in ALL]
    bench.check()


def test_borrowed_values_never_change_and_are_copied_only_while_in_use() -> None:
    bench = Bench(Async())
    (span,) = set(bench.shard.dense.spans.values())
    bench.push(1, 0)
    memory = span.values
    (lent,), _ = bench.shard.read(Wanted(ALL, 0), 0)
    sent = encode_pieces([lent])
    del lent
    bench.push(1, 1)
    assert span.values is not memory, "values with readers were not moved"
    assert decode_batch(sent)[0].array(np.float32)[0] == 1.0
    moved = span.values
    bench.push(1, 2)
    assert span.values is moved, "values without readers were moved"
    assert bench.values()[0] == (3, 3.0)


def test_a_part_of_borrowed_values_never_changes_either() -> None:
    bench = Bench(Async())
    part = bench.shard.values(ALL)[0][SIZE : 2 * SIZE]
    bench.push(1, 0)
    assert part.tolist() == [0.0] * SIZE
    buffer = pa.py_buffer(bench.shard.values(ALL)[0][SIZE : 2 * SIZE])
    bench.push(1, 1)
    assert set(np.frombuffer(buffer, np.float32)) == {2.0}


def test_a_borrowed_view_survives_the_split_of_its_span() -> None:
    bench = Bench(Async())
    bench.push(1, 0)
    (lent,), _ = bench.shard.read(Wanted(ALL, 0), 0)
    bench.push(1, 1, range(2))
    bench.push(1, 1)
    assert lent.values is not None
    assert lent.values.tolist() == np.repeat(np.arange(1.0, COUNT + 1), SIZE).tolist()


def test_the_error_names_the_invalid_row_and_no_row_is_applied() -> None:
    bench = Bench(Async())
    with pytest.raises(GradientError, match="'p0'"):
        bench.push(1, 0, gradient=float("nan"))
    short = Rows([0, 1], [0, 0], [0, 0], [0, SIZE * 4, SIZE * 4 + 4], memoryview(bytes(SIZE * 4 + 4)))
    header = PushHeader(
        trainer="t1",
        generation=1,
        plan_hash="",
        member=1,
        identity=BatchIdentity(epoch=0, task=0, batch=0, batch_count=1),
        weight=1,
        rows=2,
    )
    with pytest.raises(MessageError, match="'p1'"):
        bench.shard.push_rows(header, short)
    assert bench.values()[1:] == [(0, 0.0)] * (COUNT - 1)


def test_a_message_may_contain_gradients_and_arrivals() -> None:
    bench = Bench(Sync(reduce="sum"))
    bench.shard.set_members(
        ViewRequest(
            plan_hash="p",
            master_generation=1,
            serial=2,
            members=[ViewMember(trainer="t1", generation=1, member=1, first_round=0)],
        )
    )
    header = PushHeader(
        trainer="t1",
        generation=1,
        plan_hash="",
        member=1,
        identity=BatchIdentity(epoch=0, task=0, batch=0, batch_count=1),
        weight=1,
        rows=COUNT,
    )
    arrays = [None, None, np.full(SIZE, -1, np.float32), None, None]
    bench.shard.push_rows(header, decode_batch(encode_rows(list(ALL), [0] * COUNT, arrays)))
    assert bench.values() == [(1, 0.0), (1, 0.0), (1, 1.0), (1, 0.0), (1, 0.0)]
    bench.check()


def test_blocks_with_different_settings_or_norms_form_separate_spans() -> None:
    assert len(set(Bench(Async(), Adam(overrides={"p3": {"lr": 0.1}})).shard.dense.spans.values())) == 3
    assert len(set(Bench(Async(), LAMB(lr=0.1)).shard.dense.spans.values())) == COUNT


def test_contributions_are_added_in_the_order_of_their_batches() -> None:
    """With three of them, the sum depends on the order."""
    gradients = (1e8, 1.0, -1e8)

    def result(order: Sequence[int]) -> list[tuple[int, float]]:
        bench = Bench(Sync(reduce="sum", deterministic=True), members=(1, 2, 3))
        for batch in order:
            bench.push(1 + batch, batch, gradient=gradients[batch])
        return bench.values()

    found = [result(order) for order in permutations(range(3))]
    expected = -np.float32(np.float32(1e8 + 1.0) - np.float32(1e8))
    assert found[0][0] == (1, expected)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("pservers", [1, 3])
def test_every_block_is_in_one_run_and_runs_fit_a_message(pservers: int) -> None:
    specs = [ParameterSpec(f"p{i}", (1000 + i,), "float64" if i % 50 == 7 else "float32") for i in range(600)]
    specs.append(ParameterSpec("big", (3_000_000,)))
    plan = plan_shards(specs, pservers)
    for index in range(pservers):
        runs = runs_of(plan, index)
        assert [number for run in runs for number in run] == plan.blocks_of(index).tolist()
        for run in runs:
            blocks = [plan.block(number) for number in run]
            assert len({plan.parameters[block.parameter].dtype for block in blocks}) == 1
            assert len(run) == 1 or sum(
                block.size * plan.parameters[block.parameter].item_size_bytes for block in blocks
            ) <= block_limit(plan.parameters, pservers)


@pytest.mark.parametrize("wire", ["", "bfloat16"])
def test_a_version_is_encoded_once_for_all_readers(wire: str) -> None:
    bench = Bench(Sync(), wire=wire)
    span = bench.shard.dense.span(0)
    first = span.piece(span.numbers, bench.shard.version_range()[0], Outcome.NONE, ReceivedArray(is_for_many=True))
    second = span.piece(span.numbers, bench.shard.version_range()[0], Outcome.NONE, ReceivedArray(is_for_many=True))
    assert second.values is first.values
    assert encode_pieces([first]).equals(encode_pieces([second]))
    assert second.checksums is first.checksums
    assert second.checksums.rows is not None
    assert encode_parts([first]) == encode_parts([second])
    assert second.checksums.whole is not None
    span.carry_out(Update(0, 1, 0, [], is_of_round=False), ReceivedArray(np.ones(span.values.size, np.float32)))
    third = span.piece(span.numbers, bench.shard.version_range()[0], Outcome.NONE, ReceivedArray(is_for_many=True))
    assert not np.array_equal(third.values, first.values)
    assert not encode_pieces([third]).column(2).equals(encode_pieces([first]).column(2))
    decode_batch(encode_pieces([third]))
    decode_message(*encode_parts([third]))[0]
    del first, second, third
    span.carry_out(Update(0, 1, 0, [], is_of_round=False), ReceivedArray(np.ones(span.values.size, np.float32)))
    assert span._sent is None
