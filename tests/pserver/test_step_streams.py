"""Consecutive steps on one stream, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flightedl.domain.consistency.modes import Async
from flightedl.errors import DamagedError, FencedError, FlightedlError, MessageError, NotReadyError
from flightedl.messages.base import encode
from flightedl.messages.parameters import Outcome
from flightedl.rpc.client_streams import ClientExchange
from flightedl.rpc.reuse import HeldStream, ReusableExchange
from flightedl.wire.parts import STEP_END, STEP_SCHEMA, decode_message
from flightedl.wire.rows import OutgoingBlocks

from ..client.pserver_bench import CLOCK, Cluster
from ..rpc.rpc_support import eventually
from ..wire.encoded import encode_parts
from .fuzz import SIZES


class Counted(ReusableExchange[HeldStream]):
    """A reusable exchange that counts the streams it opens."""

    opened = 0

    def _open(self, *arguments: Any) -> Any:
        self.opened += 1
        return super()._open(*arguments)


class Stepper:
    """A member that pushes -1 to every element of a pserver with SGD of rate 1, so that each step adds 1."""

    def __init__(self) -> None:
        self.cluster = Cluster({f"p{i}": (size,) for i, size in enumerate(SIZES)}, Async(), pservers=1)
        self.server = self.cluster.servers[0]
        self.shard = self.cluster.shards[0]
        self.connection = self.cluster.connections[0]
        self.kept = Counted("step", STEP_SCHEMA, CLOCK, HeldStream)
        self.batch = 0

    def header(self, **wrong: object) -> bytes:
        self.batch += 1
        return encode(self.cluster.header(self.batch, **wrong))

    def pieces(self) -> list[OutgoingBlocks]:
        return [
            OutgoingBlocks(
                range(block.place.number, block.place.number + 1), block.rounds.version, 0, -np.ones(n, "f4"), ()
            )
            for block in self.shard.blocks()
            for n in [block.place.size]
        ]

    def step(self, header: bytes, change: Callable[[bytes], bytes] = bytes) -> list[int]:
        """Run one step and return the outcomes of its blocks."""
        with self.kept.use(self.connection, timeout_s=10.0) as exchange:
            batch, packed = encode_parts(self.pieces(), header)
            exchange.write(batch, change(packed))
            return _outcomes(exchange)

    @property
    def opened(self) -> int:
        return self.kept.opened

    def first_values(self) -> set[float]:
        return {float(block.values[0]) for block in self.shard.blocks()}


def _outcomes(exchange: ClientExchange) -> list[int]:
    """Return the outcomes of a step in async mode, whose last answer marks the end."""
    outcomes = []
    is_over = False
    while not is_over:
        batch, packed = exchange.answer()
        assert batch is not None
        assert packed is not None
        parts, said = decode_message(batch, packed)
        outcomes += [part.outcome for part in parts]
        is_over = said == STEP_END
    return outcomes


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    made = Stepper()
    with made.cluster:
        yield made
        made.kept.close_idle()


def test_steps_follow_each_other_on_one_stream(stepper: Stepper) -> None:
    (start,) = stepper.first_values()
    for _ in range(5):
        assert set(stepper.step(stepper.header())) == {Outcome.ACCEPTED}
    assert stepper.opened == 1
    assert stepper.server.running_calls == 1
    (end,) = stepper.first_values()
    assert end == start + 5
    stepper.kept.close_idle()
    eventually(lambda: stepper.server.running_calls == 0, "the stream ends")
    assert stepper.server.refusals == {}


def test_a_batch_repeated_on_the_same_stream_counts_once(stepper: Stepper) -> None:
    header = stepper.header()
    stepper.step(header)
    before = stepper.first_values()
    assert set(stepper.step(header)) == {Outcome.ALREADY_APPLIED}
    assert stepper.first_values() == before
    assert stepper.opened == 1


def test_answers_have_the_form_of_their_messages(stepper: Stepper) -> None:
    (start,) = stepper.first_values()

    def answers(*, inline: bool) -> list[bool]:
        """Return True for each answer that was a record batch."""
        found, said = [], b""
        batch, packed = encode_parts(stepper.pieces(), stepper.header(), inline=inline)
        with stepper.kept.use(stepper.connection, timeout_s=10.0) as exchange:
            if batch is None:
                exchange.write_metadata(packed)
            else:
                exchange.write(batch, packed)
            while said != STEP_END:
                answer, header = exchange.answer()
                parts, said = decode_message(answer, header, exchange.columns)
                assert {part.outcome for part in parts} == {Outcome.ACCEPTED}
                found.append(answer is not None)
        return found

    assert all(answers(inline=False))
    assert not any(answers(inline=True))
    assert stepper.opened == 1
    assert stepper.first_values() == {start + 2}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"plan_hash": "0" * 32}, FencedError), ({"rows": 1}, MessageError), ({"rows": 0}, MessageError)],
    ids=["plan", "more rows than announced", "rows where none were announced"],
)
def test_every_step_is_checked_separately(stepper: Stepper, wrong: dict[str, object], error: type[Exception]) -> None:
    stepper.step(stepper.header())
    before = stepper.first_values()
    header = stepper.header(**wrong)
    with pytest.raises(error):
        stepper.step(header)
    assert stepper.first_values() == before
    assert not stepper.kept.is_open
    stepper.step(stepper.header())
    assert stepper.opened == 2


def test_missing_rows_are_reported_at_the_end_of_the_stream(stepper: Stepper) -> None:
    header = stepper.header(rows=len(stepper.shard.numbers) + 1)

    def push() -> None:
        with stepper.connection.exchange(b'{"verb": "step"}', STEP_SCHEMA, timeout_s=10.0) as exchange:
            exchange.write(*encode_parts(stepper.pieces(), header))
            exchange.done_writing()

    with pytest.raises(MessageError, match="1 of 5 announced rows are missing"):
        push()
    assert stepper.server.refusals == {"message": 1}


def test_a_damaged_header_is_rejected(stepper: Stepper) -> None:
    stepper.step(stepper.header())
    before = stepper.first_values()
    with pytest.raises(DamagedError):
        stepper.step(stepper.header(), lambda packed: packed[:-3] + b"9" + packed[-2:])
    assert stepper.first_values() == before


@pytest.mark.parametrize("attached", [b"", b"{}", b'{"verb": "step"}', b"\xff"])
def test_a_step_without_a_request_is_rejected(stepper: Stepper, attached: bytes) -> None:
    before = stepper.first_values()
    with pytest.raises(MessageError):
        stepper.step(attached)
    assert stepper.first_values() == before


def test_a_message_without_a_header_is_reported_at_any_position(stepper: Stepper) -> None:
    pieces = stepper.pieces()
    with stepper.kept.use(stepper.connection, timeout_s=10.0) as exchange:
        exchange.write(*encode_parts(pieces[:1], stepper.header()))
        exchange.write(encode_parts(pieces[1:])[0])
        exchange.answer()
        with pytest.raises(MessageError, match="no header"):
            exchange.answer()


def test_a_step_cannot_begin_with_metadata_alone(stepper: Stepper) -> None:
    with stepper.kept.use(stepper.connection, timeout_s=10.0) as exchange:
        exchange.write_metadata(stepper.header())
        with pytest.raises(MessageError, match="must have values"):
            exchange.answer()


def test_a_step_that_begins_within_another_one_is_rejected(stepper: Stepper) -> None:
    pieces = stepper.pieces()
    with stepper.kept.use(stepper.connection, timeout_s=10.0) as exchange:
        exchange.write(*encode_parts(pieces[:1], stepper.header()))
        exchange.write(*encode_parts(pieces[1:], stepper.header()))
        exchange.answer()
        with pytest.raises(MessageError, match="before the previous one has ended"):
            exchange.answer()


def test_a_stopping_server_does_not_wait_for_a_stream_between_two_steps(stepper: Stepper) -> None:
    stepper.step(stepper.header())
    eventually(lambda: all(call.is_resting for call in stepper.server._admission.running), "nothing is under way")
    begun = time.monotonic()
    assert stepper.server.stop(grace_s=30)
    assert time.monotonic() - begun < 20
    with pytest.raises(FlightedlError) as caught:
        stepper.step(stepper.header())
    assert caught.value.retryable or caught.value.code == "outcome_unknown"


def test_a_step_is_rejected_while_the_server_stops(stepper: Stepper) -> None:
    stepper.step(stepper.header())
    before = stepper.first_values()
    eventually(lambda: all(call.is_resting for call in stepper.server._admission.running), "nothing is under way")
    stepper.server.closing.set()
    with pytest.raises(NotReadyError):
        stepper.step(stepper.header())
    assert stepper.first_values() == before


def test_a_disconnect_between_two_steps_is_not_an_error(stepper: Stepper) -> None:
    stepper.step(stepper.header())
    stepper.connection.abort_calls()
    eventually(lambda: stepper.server.running_calls == 0, "the stream ends")
    assert stepper.server.refusals == {}


def test_a_second_thread_gets_a_separate_stream(stepper: Stepper) -> None:
    first = stepper.header()
    with stepper.kept.use(stepper.connection, timeout_s=10.0) as exchange:
        assert stepper.opened == 1
        stepper.step(stepper.header())
        assert stepper.opened == 2
        exchange.write(*encode_parts(stepper.pieces(), first))
        _outcomes(exchange)
    stepper.step(stepper.header())
    assert stepper.opened == 2, "the first stream was not reused"
    eventually(lambda: stepper.server.running_calls == 1, "the other one ends")
