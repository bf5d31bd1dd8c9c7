"""Invalid pushes over real sockets are rejected with a code and counted, change nothing, and the pserver continues."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.errors import FlightedlError, GradientError, MessageError
from flightedl.messages.base import encode
from flightedl.messages.parameters import BatchIdentity, PullTicket, PushHeader
from flightedl.rpc import Connection, Limits, ServerIdentity
from flightedl.rpc.call import Message
from flightedl.wire.parts import STEP_SCHEMA
from flightedl.wire.rows import PUSH_SCHEMA, OutgoingBlocks, encode_rows

from ..client.pserver_bench import Cluster
from ..wire.encoded import encode_parts
from .fuzz import SIZES, mutated

SHAPES = {f"p{i}": (size,) for i, size in enumerate(SIZES)}
Arrays = list[np.ndarray]


class Attack:
    """A pserver with two adjacent blocks, a third block on another pserver, and a sender that is a member."""

    def __init__(self, mode: Mode) -> None:
        self.cluster = Cluster(SHAPES | {"far": (400_000,)}, mode, pservers=2)
        self.shard = self.cluster.shards[0]
        self.server = self.cluster.servers[0]
        self.numbers = self.shard.numbers
        self.sizes = [self.cluster.plan.block(n).size for n in self.numbers]
        self.connection = self.cluster.connections[0]
        self.batch = 0

    def header(self, **wrong: object) -> PushHeader:
        self.batch += 1
        return self.cluster.header(self.batch, **wrong)

    def arrays(self) -> Arrays:
        return [np.full(size, -1, np.float32) for size in self.sizes]

    def rows(self, arrays: Arrays | None = None, ahead: int = 0) -> pa.RecordBatch:
        versions = [block.rounds.version + ahead for block in self.shard.blocks()]
        return encode_rows(self.numbers, versions, self.arrays() if arrays is None else arrays)

    def put(
        self, header: bytes, *batches: pa.RecordBatch, schema: pa.Schema = PUSH_SCHEMA, timeout_s: float = 10.0
    ) -> bytes:
        put = header.replace(b'"verb":"step"', b'"verb":"push"')
        return self.connection.put(put, schema, ((batch, None) for batch in batches), timeout_s=timeout_s)

    def state(self) -> list[tuple[int, bytes]]:
        return [(block.rounds.version, block.values.tobytes()) for block in self.shard.blocks()]

    def require_healthy(self) -> None:
        before = [version for version, _ in self.state()]
        self.put(encode(self.header()), self.rows())
        assert [version for version, _ in self.state()] == [version + 1 for version in before]
        assert all(len(set(block.values.tolist())) == 1 for block in self.shard.blocks())


@pytest.fixture(params=[Async(), Sync(reduce="sum")], ids=["async", "sync"])
def attack(request: pytest.FixtureRequest) -> Iterator[Attack]:
    made = Attack(request.param)
    with made.cluster:
        yield made


def _array(attack: Attack, place: int, value: float) -> Arrays:
    arrays = attack.arrays()
    arrays[-1][place] = value
    return arrays


def _columns(attack: Attack, **changed: pa.Array) -> pa.RecordBatch:
    rows = attack.rows()
    columns = {name: changed.get(name, rows.column(name)) for name in rows.schema.names}
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=PUSH_SCHEMA)


def _other_type(attack: Attack) -> bytes:
    schema = PUSH_SCHEMA.set(0, pa.field("block", pa.int64(), nullable=False))
    columns = [column.cast(field.type) for column, field in zip(attack.rows().columns, schema, strict=True)]
    return attack.put(encode(attack.header()), pa.RecordBatch.from_arrays(columns, schema=schema), schema=schema)


#: Error -> (how it is sent, expected code).
WRONG: dict[str, tuple[Callable[[Attack], object], str]] = {
    "plan hash": (lambda a: a.put(encode(a.header(plan_hash="0" * 32)), a.rows()), "fenced"),
    "base from the future": (lambda a: a.put(encode(a.header()), a.rows(ahead=7)), "message"),
    "NaN": (lambda a: a.put(encode(a.header()), a.rows(_array(a, 0, np.nan))), "gradient"),
    "infinity": (lambda a: a.put(encode(a.header()), a.rows(_array(a, -1, -np.inf))), "gradient"),
    "null": (
        lambda a: a.put(encode(a.header()), _columns(a, version=pa.array([None] * len(a.numbers), pa.int64()))),
        "message",
    ),
    "checksum": (
        lambda a: a.put(encode(a.header()), _columns(a, checksum=pa.array([1] * len(a.numbers), pa.uint64()))),
        "damaged",
    ),
    "block of another pserver": (
        lambda a: a.put(encode(a.header()), encode_rows([a.cluster.shards[1].numbers[0]], [0], a.arrays()[:1])),
        "message",
    ),
    "block that there is not": (
        lambda a: a.put(encode(a.header()), encode_rows([99_999], [0], a.arrays()[:1])),
        "message",
    ),
    "shape": (lambda a: a.put(encode(a.header()), a.rows([np.ones(s + 1, np.float32) for s in a.sizes])), "message"),
    "dtype": (lambda a: a.put(encode(a.header()), a.rows([np.ones(s, np.float64) for s in a.sizes])), "message"),
    "column type": (_other_type, "message"),
    "field name": (lambda a: a.put(encode(a.header()).replace(b'"weight"', b'"wait"'), a.rows()), "message"),
    "generation of the server": (
        lambda a: Connection(a.server.address, expected=ServerIdentity("bench", "pserver", 0, 2)).action(
            "status", b"", timeout_s=5.0
        ),
        "replaced",
    ),
    "sum that names a batch twice": (
        lambda a: a.put(
            encode(a.header(further=[BatchIdentity(epoch=0, task=a.batch + 1, batch=0, batch_count=1)])), a.rows()
        ),
        "message",
    ),
    "pull of a foreign block": (
        lambda a: list(_get(a, PullTicket(plan_hash=a.cluster.plan.hash, blocks=[99_999]))),
        "message",
    ),
    "pull with too few versions": (
        lambda a: list(_get(a, PullTicket(plan_hash=a.cluster.plan.hash, blocks=[0, 1, 2], min_versions=[0, 0]))),
        "message",
    ),
}


def _get(attack: Attack, ticket: PullTicket) -> Iterator[object]:
    with attack.connection.get(encode(ticket), timeout_s=5.0) as stream:
        yield from stream


@pytest.mark.parametrize("wrong", WRONG)
def test_an_invalid_push_is_rejected_counted_and_changes_nothing(attack: Attack, wrong: str) -> None:
    send, code = WRONG[wrong]
    before = attack.state()
    if wrong == "base from the future" and isinstance(attack.cluster.mode, Async):
        # It may be of values that were there before the pserver was restored: its sender pulls, and pushes again.
        assert b'"stale":%d' % len(attack.numbers) in send(attack)
        assert attack.state() == before
        assert sum(attack.shard.meter.rows_by_outcome.values()) == len(attack.numbers)
        attack.require_healthy()
        return
    with pytest.raises(FlightedlError) as caught:
        send(attack)
    assert caught.value.code == code, caught.value
    assert attack.state() == before
    assert attack.server.refusals.get(code, 0) >= 1
    assert attack.server.running_calls == 0
    attack.require_healthy()


@pytest.mark.parametrize("wrong", [{"member": 77}, {"generation": 77}, {"trainer": "t77"}], ids=str)
def test_a_sender_that_is_not_a_member_gets_this_answer_and_is_counted(
    attack: Attack, wrong: dict[str, object]
) -> None:
    before = attack.state()
    assert b'"not_member":%d' % len(attack.numbers) in attack.put(encode(attack.header(**wrong)), attack.rows())
    assert attack.state() == before
    assert sum(attack.shard.meter.rows_by_outcome.values()) == len(attack.numbers)
    attack.require_healthy()


@pytest.mark.parametrize("size", [65 << 20, pytest.param(1 << 30, marks=[pytest.mark.slow, pytest.mark.storm])])
def test_an_oversized_row_is_rejected_before_its_use(attack: Attack, size: int) -> None:
    before = attack.state()
    row = encode_rows(attack.numbers[:1], [0], [np.zeros(size, np.uint8)])
    with pytest.raises(FlightedlError) as caught:
        # A GB takes its time on a busy machine.
        attack.put(encode(attack.header()), row, timeout_s=50.0)
    assert caught.value.code in {"message", "outcome_unknown", "usage"}, caught.value
    assert attack.state() == before
    attack.require_healthy()


def _raw(attack: Attack, verb: str = "push") -> tuple[flight.FlightClient, flight.FlightDescriptor]:
    header = encode(attack.header()).replace(b'"verb":"step"', b'"verb":"%s"' % verb.encode())
    return flight.FlightClient(f"grpc://{attack.server.address}"), flight.FlightDescriptor.for_command(header)


def _until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_batch_of_a_truncated_stream_can_be_sent_again(attack: Attack) -> None:
    """Each row is applied separately: rows that arrived are applied, and acknowledged when they are sent again."""
    client, descriptor = _raw(attack)
    writer, _ = client.do_put(descriptor, PUSH_SCHEMA)
    writer.done_writing()
    with pytest.raises(flight.FlightError, match="broke off"):
        writer.close()
    header = encode(attack.header()).replace(b'"verb":"step"', b'"verb":"push"')
    rows = attack.rows()
    writer, _ = client.do_put(flight.FlightDescriptor.for_command(header), PUSH_SCHEMA)
    writer.write_batch(rows)
    writer.done_writing()
    with pytest.raises(flight.FlightError, match="broke off"):
        writer.close()
    assert attack.server.refusals["message"] == 2
    taken = attack.state()
    assert b'"already_applied":%d' % len(attack.numbers) in attack.put(header, rows)
    assert attack.state() == taken
    client.close()
    attack.require_healthy()


def test_a_client_that_disconnects_mid_stream_leaves_no_thread_behind(attack: Attack) -> None:
    before = attack.state()
    client, descriptor = _raw(attack, "step")
    writer, _ = client.do_exchange(descriptor)
    writer.begin(PUSH_SCHEMA)
    client.close()
    del writer
    _until(lambda: attack.server.running_calls == 0)
    assert attack.state() == before
    attack.require_healthy()


_ONES = np.full(8, -1, np.float32)


def _begun(attack: Attack, *pieces: OutgoingBlocks) -> Message:
    """Return the first message of a step."""
    return encode_parts(pieces, encode(attack.header()))


@pytest.mark.parametrize(
    "message",
    [
        lambda a: _begun(a, OutgoingBlocks(range(a.numbers[0], a.numbers[0] + 1), 0, 0, _ONES, ())),
        lambda a: _begun(a, OutgoingBlocks(range(a.numbers[0], a.cluster.plan.block_count), 0, 0, None, ())),
        lambda a: _begun(a, OutgoingBlocks(range(99_999, 100_000), 0, 0, None, ())),
        lambda a: _begun(a, *(OutgoingBlocks(range(n, n + 1), 0, 0, None, ()) for n in a.numbers for _ in range(2))),
        lambda a: (_begun(a, OutgoingBlocks(range(a.numbers[0], a.numbers[0] + 1), 0, 0, a.arrays()[0], ()))[0], b"{}"),
        lambda a: (_begun(a, OutgoingBlocks(range(a.numbers[0], a.numbers[0] + 1), 0, 0, a.arrays()[0], ()))[0], None),
        lambda a: _begun(a, OutgoingBlocks(range(a.numbers[0], a.numbers[0] + 1), 0, 0, a.arrays()[0] * np.nan, ())),
    ],
    ids=["size", "foreign neighbors", "no block", "more than all", "header", "no header", "nan"],
)
def test_an_invalid_message_of_a_step_is_rejected(attack: Attack, message: Callable[[Attack], Message]) -> None:
    before = attack.state()
    with pytest.raises((MessageError, GradientError)):
        _step(attack, STEP_SCHEMA, message(attack))
    assert attack.state() == before
    attack.require_healthy()


def test_a_step_with_the_columns_of_a_push_is_rejected(attack: Attack) -> None:
    before = attack.state()
    with pytest.raises(MessageError, match="schema"):
        _step(attack, PUSH_SCHEMA, (attack.rows(), None))
    assert attack.state() == before
    attack.require_healthy()


def _step(attack: Attack, schema: pa.Schema, message: Message) -> None:
    with attack.connection.exchange(b'{"verb": "step"}', schema, timeout_s=10.0) as exchange:
        exchange.write(*message)
        exchange.done_writing()
        while exchange.read() is not None:
            pass


def test_a_slow_stream_ends_at_its_deadline(attack: Attack) -> None:
    before = attack.state()
    client, descriptor = _raw(attack)
    options = flight.FlightCallOptions(headers=[(b"flightedl-timeout", b"0.5")])
    attack.server._admission.limits = Limits(sever_after_s=0.1)
    writer, _ = client.do_put(descriptor, PUSH_SCHEMA, options=options)
    # It sends nothing more, and never ends.
    _until(lambda: attack.server.running_calls == 0 and attack.server.refusals)
    with pytest.raises((flight.FlightError, pa.ArrowException)):
        writer.close()
    client.close()
    assert attack.state() == before
    attack.require_healthy()


def test_damaged_messages_over_a_socket_change_nothing(attack: Attack) -> None:
    """As the fuzzer, with a transport in between: Arrow's framing is valid, its contents are not."""
    chance = random.Random(4)
    for _ in range(150):
        before = attack.state()
        header = encode(attack.header())
        rows = attack.rows()
        if chance.random() < 0.5:
            header = mutated(header, chance)
        else:
            values = [mutated(value, chance) for value in rows.column("values").to_pylist()]
            rows = _columns(attack, values=pa.array(values, pa.binary()))
        try:
            attack.put(header, rows)
        except FlightedlError:
            assert attack.state() == before
    assert sum(attack.server.refusals.values()) > 75
    attack.require_healthy()
