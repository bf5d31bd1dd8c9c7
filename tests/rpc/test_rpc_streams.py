"""Rules of streams, and hostile streams: incomplete or invalid data is never accepted as complete."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from flightedl.errors import (
    DeadlineError,
    InternalError,
    MessageError,
    OutcomeUnknownError,
    UnavailableError,
)
from flightedl.rpc import BatchLimits, Call, Connection, Exchange, FlightServer, Incoming, Limits, PutRoute, Routes
from flightedl.rpc.streams import BrokenOffError
from flightedl.rpc.validation import Tally

from .rpc_support import BATCH, IDENTITY, SCHEMA, TIMEOUT_S, Handlers, command, eventually, make_batch, options

UPLOAD = b'{"verb": "upload"}'


def commit_record(*batches: pa.RecordBatch) -> bytes:
    tally = Tally(SCHEMA, BatchLimits())
    for batch in batches:
        tally.add(batch)
    return tally.commit_record()


def put_bare(client: flight.FlightClient, *messages: pa.RecordBatch | bytes, verb: bytes = UPLOAD) -> bytes:
    """Upload with plain pyarrow: batches, and messages that consist of metadata only."""
    schema = next((message.schema for message in messages if isinstance(message, pa.RecordBatch)), SCHEMA)
    writer, reader = client.do_put(command(verb), schema, options())
    try:
        for message in messages:
            if isinstance(message, bytes):
                writer.write_metadata(message)
            else:
                writer.write_batch(message)
        writer.done_writing()
        answer = reader.read()
        return b"" if answer is None else answer.to_pybytes()
    finally:
        writer.close()


def test_a_stream_rests_only_while_it_waits_for_its_next_request() -> None:
    """A server that stops does not wait for streams at rest."""
    call: Any = SimpleNamespace(is_resting=False)
    exchange = Exchange(None, None, SCHEMA, call, BatchLimits())  # type: ignore[arg-type]
    assert exchange.at_rest(lambda: call.is_resting)
    assert not call.is_resting

    def break_off() -> None:
        raise BrokenOffError("the client is gone")

    assert exchange.at_rest(break_off) is None
    assert exchange.is_complete
    assert not call.is_resting


def test_a_plain_flight_client_can_upload(bare: flight.FlightClient, handlers: Handlers) -> None:
    assert put_bare(bare, BATCH, BATCH, commit_record(BATCH, BATCH)) == b"6"
    assert commit_record(BATCH, BATCH) == b'{"commit":{"batches":2,"rows":6,"bytes":72}}'
    assert handlers.uploads == [(6, True)]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((BATCH,), "before its commit record"),
        ((), "before its commit record"),
        ((BATCH, commit_record(BATCH, BATCH)), "commit record says"),
        ((BATCH, BATCH, commit_record(BATCH)), "commit record says"),
        ((BATCH, commit_record(BATCH), BATCH), "follows the upload's commit record"),
        ((BATCH, b'{"comit":{}}'), "without a batch before"),
        ((BATCH, b'{"commit":3}'), "not valid"),
        ((BATCH, b'{"commit":{"rows":3,"rows":3,"more":1}}'), "not valid"),
        ((BATCH, b'{"commit":' + b"[" * 50_000), "not valid"),
        ((b"alone",), "without a batch before"),
        ((BATCH, b"x" * 200_000), "metadata, too many"),
    ],
)
def test_an_upload_without_a_correct_commit_record_is_incomplete(
    bare: flight.FlightClient, handlers: Handlers, messages: tuple[pa.RecordBatch | bytes, ...], words: str
) -> None:
    with pytest.raises(flight.FlightServerError, match=words) as caught:
        put_bare(bare, *messages)
    assert b'"code":"message"' in caught.value.extra_info
    assert [is_complete for _, is_complete in handlers.uploads] == [False]


def test_an_upload_of_a_killed_client_is_incomplete(server: FlightServer, handlers: Handlers) -> None:
    program = f"""
import sys, pyarrow as pa
from pyarrow import flight
schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("values", pa.binary(), nullable=False)])
client = flight.FlightClient("grpc://{server.address}")
writer, reader = client.do_put(flight.FlightDescriptor.for_command({UPLOAD!r}), schema)
writer.write_batch(pa.record_batch([pa.array([1]), pa.array([b"x"])], schema=schema))
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
        eventually(handlers.entered.is_set, "the upload begins")
        child.send_signal(signal.SIGKILL)
        child.wait()
    eventually(handlers.ended.is_set, "the upload ends")
    assert handlers.uploads[0][1] is False


def test_an_iterable_that_raises_leaves_the_upload_incomplete(connection: Connection, handlers: Handlers) -> None:
    def batches() -> Iterator[tuple[pa.RecordBatch, None]]:
        yield BATCH, None
        raise RuntimeError("the trainer's own bug")

    with pytest.raises(RuntimeError, match="own bug"):
        connection.put(UPLOAD, SCHEMA, batches(), timeout_s=TIMEOUT_S)
    eventually(handlers.ended.is_set, "the upload ends")
    assert handlers.uploads == [(3, False)]


@pytest.mark.parametrize("leaves_by_error", [False, True])
def test_an_exchange_left_early_is_incomplete(
    connection: Connection, handlers: Handlers, leaves_by_error: bool
) -> None:
    expectation = pytest.raises(RuntimeError, match="left") if leaves_by_error else contextlib.nullcontext()
    with expectation, connection.exchange(b'{"verb": "mirror"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange:
        exchange.write(BATCH)
        exchange.read()
        if leaves_by_error:
            raise RuntimeError("left")
    eventually(handlers.ended.is_set, "the exchange ends")
    assert handlers.uploads == [(0, False)]


def test_a_get_left_early_ends_on_the_server(connection: Connection, server: FlightServer, handlers: Handlers) -> None:
    with connection.get(b'{"verb": "endless"}', timeout_s=30.0) as download:
        assert next(iter(download))[0] is not None
    eventually(handlers.ended.is_set, "the server's iterator is closed")
    eventually(lambda: server.running_calls == 0, "the call is released")


def test_an_answer_that_has_arrived_completely_is_accepted(connection: Connection, bare: flight.FlightClient) -> None:
    with connection.get(b'{"verb": "whole"}', timeout_s=TIMEOUT_S, schema=SCHEMA) as download:
        assert download.text == b'{"all": true}'
        assert [(batch.num_rows, metadata) for batch, metadata in download if batch] == [(3, None), (1, None)]
    with connection.get(b'{"verb": "whole", "what": "nothing"}', timeout_s=TIMEOUT_S) as download:
        assert download.text == b'{"all": true}'
        assert list(download) == []
    with connection.get(b'{"verb": "numbers"}', timeout_s=TIMEOUT_S) as download:
        assert download.text == b""
    reader = bare.do_get(flight.Ticket(b'{"verb": "whole"}'), options())
    assert reader.schema.metadata == {b"reply": b'{"all": true}'}
    assert reader.read_all().num_rows == 4


def test_a_get_ends_if_its_client_never_reads(bare: flight.FlightClient, server: FlightServer) -> None:
    reader = bare.do_get(flight.Ticket(b'{"verb": "endless"}'), options(0.3))
    eventually(lambda: server.running_calls == 0, "the deadline frees the server")
    del reader


def test_the_error_of_a_rejected_upload_reaches_the_client(connection: Connection, handlers: Handlers) -> None:
    handlers.failures.append(MessageError("no, thank you"))
    for count in (1, 1000):
        with pytest.raises(MessageError, match="no, thank you"):
            connection.put(b'{"verb": "fail"}', SCHEMA, [(make_batch(1, 4096), None)] * count, timeout_s=TIMEOUT_S)


def test_the_error_of_a_rejected_exchange_reaches_the_client(connection: Connection, handlers: Handlers) -> None:
    handlers.failures.append(MessageError("no, thank you"))
    for count in (1, 1000):
        with (  # noqa: PT012
            pytest.raises(MessageError, match="no, thank you"),
            connection.exchange(b'{"verb": "fail"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange,
        ):
            for _ in range(count):
                exchange.write(make_batch(1, 4096))
            exchange.done_writing()


def test_an_unread_answer_still_raises_its_error(connection: Connection, handlers: Handlers) -> None:
    handlers.failures.append(MessageError("too late"))
    with (
        pytest.raises(MessageError, match="too late"),
        connection.exchange(b'{"verb": "fail"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange,
    ):
        exchange.done_writing()


def test_acknowledgements_have_a_size_limit(serve: Callable[..., FlightServer]) -> None:
    def wordy(descriptor: bytes, incoming: Incoming, call: Call) -> bytes:
        return b"x" * 2000

    server = serve(Routes(puts={"upload": PutRoute(SCHEMA, wordy)}))
    with Connection(server.address) as connection, pytest.raises(InternalError, match="acknowledgement"):
        connection.put(UPLOAD, SCHEMA, [], timeout_s=TIMEOUT_S)


def test_a_get_that_fails_half_way_raises(connection: Connection, handlers: Handlers) -> None:
    handlers.failures.append(UnavailableError("lost it"))
    received = []
    with (  # noqa: PT012
        pytest.raises(UnavailableError, match="lost it"),
        connection.get(b'{"verb": "fail"}', timeout_s=TIMEOUT_S) as download,
    ):
        for batch, _ in download:
            received.append(batch)
    assert received == [BATCH]


def test_a_client_that_never_reads_answers_hits_its_deadline(connection: Connection) -> None:
    big = make_batch(1, 4 << 20)
    with (  # noqa: PT012
        pytest.raises(DeadlineError),
        connection.exchange(b'{"verb": "mirror"}', SCHEMA, timeout_s=0.5) as exchange,
    ):
        for _ in range(100):
            exchange.write(big)


# --- schema and soundness ---


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([pa.field("id", pa.int32(), nullable=False), SCHEMA.field(1)]),
        pa.schema([pa.field("id", pa.int64()), SCHEMA.field(1)]),
        pa.schema([SCHEMA.field(1), SCHEMA.field(0)]),
        pa.schema([SCHEMA.field(0)]),
        pa.schema([*SCHEMA, pa.field("more", pa.int8())]),
        pa.schema([pa.field("x" * 50_000, pa.int64())]),
        pa.schema([]),
    ],
)
def test_other_schemas_are_rejected(connection: Connection, handlers: Handlers, schema: pa.Schema) -> None:
    with pytest.raises(MessageError, match="schema is"):
        connection.put(UPLOAD, schema, [], timeout_s=TIMEOUT_S)
    with (
        pytest.raises(MessageError, match="schema is"),
        connection.exchange(b'{"verb": "mirror"}', schema, timeout_s=TIMEOUT_S) as exchange,
    ):
        exchange.done_writing()
    assert not any(is_complete for _, is_complete in handlers.uploads)


def test_a_download_of_another_schema_is_rejected(connection: Connection) -> None:
    with (
        pytest.raises(MessageError, match="schema is"),
        connection.get(b'{"verb": "numbers"}', timeout_s=TIMEOUT_S, schema=pa.schema([("id", pa.int64())])) as download,
    ):
        list(download)


def unsound_batch(offsets: list[int]) -> pa.RecordBatch:
    """Return a binary column with offsets outside its data; reading its values would crash the process."""
    rows = len(offsets) - 1
    memory = np.zeros(rows + 1, np.int32)
    column = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(memory), pa.py_buffer(b"abcdefgh")])
    # Arrow checks offsets when it creates the array, so they are corrupted afterwards.
    memory[:] = offsets
    return pa.RecordBatch.from_arrays([pa.array(range(rows), pa.int64()), column], schema=SCHEMA)


@pytest.mark.parametrize("offsets", [[0, 1 << 30], [0, 8, 4], [0, -4, 8], [-8, 8]])
def test_offsets_outside_their_data_are_rejected(
    bare: flight.FlightClient, connection: Connection, offsets: list[int]
) -> None:
    with pytest.raises((flight.FlightServerError, pa.ArrowException)):
        put_bare(bare, unsound_batch(offsets), commit_record())
    assert connection.action("echo", b"alive", timeout_s=TIMEOUT_S) == b"alive"


def test_the_check_itself_rejects_unsound_offsets(bare: flight.FlightClient) -> None:
    with pytest.raises(flight.FlightServerError, match="not valid"):
        put_bare(bare, unsound_batch([0, 8, 4]), commit_record())


def test_nulls_are_rejected(bare: flight.FlightClient) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1, None], pa.int64()), pa.array([b"", b""])], schema=SCHEMA)
    with pytest.raises(flight.FlightServerError, match="has a null"):
        put_bare(bare, batch, commit_record(batch))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (BatchLimits(batch_rows=2), "3 rows"),
        (BatchLimits(batch_bytes=10), "bytes, at most 10"),
        (BatchLimits(stream_rows=5), "more than 5 rows"),
        (BatchLimits(stream_bytes=70), "70 bytes"),
    ],
)
def test_streams_are_limited_in_size(
    serve: Callable[..., FlightServer], handlers: Handlers, limits: BatchLimits, words: str
) -> None:
    server = serve(handlers.routes(), limits=Limits(batches=limits))
    with Connection(server.address) as connection, pytest.raises(MessageError, match=words):
        connection.put(UPLOAD, SCHEMA, [(BATCH, None), (BATCH, None)], timeout_s=TIMEOUT_S)
    assert not handlers.uploads[0][1]


@pytest.mark.parametrize(
    "request_bytes",
    [b"", b"null", b"[]", b"{}", b'{"verb": 1}', b'{"verb": "upload"', b"\xff\xfe", b"{" * 100_000, b'{"verb":"no"}'],
)
def test_malformed_requests_are_rejected(connection: Connection, request_bytes: bytes) -> None:
    with pytest.raises(MessageError), connection.get(request_bytes, timeout_s=TIMEOUT_S) as download:
        list(download)
    with pytest.raises(MessageError):
        connection.put(request_bytes, SCHEMA, [], timeout_s=TIMEOUT_S)
    with (
        pytest.raises(MessageError),
        connection.exchange(request_bytes, SCHEMA, timeout_s=TIMEOUT_S) as exchange,
    ):
        exchange.done_writing()


def test_an_unknown_verb_is_answered_with_the_known_ones(connection: Connection) -> None:
    with pytest.raises(MessageError, match="known here: echo, fail, wait"):
        connection.action("no" * 500, b"", timeout_s=TIMEOUT_S)


def test_oversize_requests_are_rejected(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    server = serve(handlers.routes(), limits=Limits(request_bytes=1000))
    ticket = b'{"verb": "numbers", "x": "' + b"x" * 1000 + b'"}'
    with Connection(server.address) as connection:
        with pytest.raises(MessageError, match="at most 1000"), connection.get(ticket, timeout_s=TIMEOUT_S) as download:
            list(download)
        with pytest.raises(MessageError, match="at most 1000"):
            connection.put(ticket, SCHEMA, [], timeout_s=TIMEOUT_S)
        with pytest.raises(MessageError, match="at most 1000"):
            connection.action("echo", ticket, timeout_s=TIMEOUT_S)


def test_path_descriptors_are_rejected(bare: flight.FlightClient) -> None:
    with pytest.raises(flight.FlightServerError, match="not a path"):
        bare.get_flight_info(flight.FlightDescriptor.for_path("a", "b"), options())


# --- slow peers ---


def test_a_stream_ends_at_the_deadline_of_the_server(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    server = serve(handlers.routes(), limits=Limits(stream_s=0.3))
    sent = 0
    with flight.FlightClient(f"grpc://{server.address}") as client:
        writer, _ = client.do_put(command(UPLOAD), SCHEMA)
        with pytest.raises(flight.FlightTimedOutError, match="time for this stream is over"):  # noqa: PT012
            while sent < 10_000:
                writer.write_batch(BATCH)
                sent += 1
                handlers.ended.wait(0.01)
        with pytest.raises(flight.FlightError):
            writer.close()
    assert handlers.uploads[0][1] is False


@pytest.mark.parametrize("what", ["silent upload", "unread get"])
def test_a_peer_that_neither_sends_nor_reads_loses_its_connection(
    serve: Callable[..., FlightServer], handlers: Handlers, what: str
) -> None:
    server = serve(handlers.routes(), limits=Limits(stream_s=0.1, sever_after_s=0.1))
    with flight.FlightClient(f"grpc://{server.address}") as client:
        if what == "silent upload":
            writer, _ = client.do_put(command(UPLOAD), SCHEMA)
            writer.write_batch(BATCH)
        else:
            reader = client.do_get(flight.Ticket(b'{"verb": "endless"}'))
            assert reader.read_chunk().data is not None
        eventually(handlers.ended.is_set, "the handler's stream ends")
        eventually(lambda: server.running_calls == 0, "the call is released")
        # The same client continues with a new connection, once it has seen the end of the old one.
        eventually(lambda: _echoes(client), "a new connection")
        if what == "silent upload":
            with pytest.raises(flight.FlightError):
                writer.close()


def _echoes(client: flight.FlightClient) -> bool:
    try:
        return [each.body.to_pybytes() for each in client.do_action(flight.Action("echo", b"x"), options())] == [b"x"]
    except flight.FlightError:
        return False


def test_a_server_killed_during_a_call_leaves_the_outcome_unknown() -> None:
    program = f"""
import os, signal, sys
import pyarrow as pa
from flightedl.adapters.clock import SystemClock
from flightedl.rpc import FlightServer, Routes, PutRoute, ServerIdentity
schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("values", pa.binary(), nullable=False)])
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
identity = ServerIdentity("digits", "pserver", 1, {IDENTITY.generation})
routes = Routes(actions={{"die": die}}, puts={{"die": PutRoute(schema, die)}})
server = FlightServer(routes, identity, clock=SystemClock())
server.start_serving(identity)
print(server.address, flush=True)
sys.stdin.read()
"""
    for method in ("action", "put"):
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            with Connection(child.stdout.readline().strip(), expected=IDENTITY) as connection:
                with pytest.raises(OutcomeUnknownError) as caught:
                    _die(connection, method)
                assert not caught.value.retryable
                child.wait()
                eventually(partial(_is_refused, connection, method), f"after its server's death a further {method}")


def _is_refused(connection: Connection, method: str) -> bool:
    """True if a call is known not to have been sent. A call written before the death is detected may have been."""
    with pytest.raises((OutcomeUnknownError, UnavailableError)) as caught:
        _die(connection, method)
    return isinstance(caught.value, UnavailableError) and "not reachable: Connection refused" in str(caught.value)


def _die(connection: Connection, method: str) -> None:
    if method == "action":
        connection.action("die", b"", timeout_s=TIMEOUT_S)
    else:
        connection.put(b'{"verb": "die"}', SCHEMA, [(BATCH, None)], timeout_s=TIMEOUT_S)


def test_random_offsets_never_crash_the_server(bare: flight.FlightClient, connection: Connection) -> None:
    generator = np.random.default_rng(0)
    edges = [-(1 << 31), -1, 0, 1, 7, 8, 9, (1 << 31) - 1]
    for _ in range(200):
        offsets = generator.choice(edges, generator.integers(2, 6)).tolist()
        is_sound = offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= 8
        if not is_sound:
            with pytest.raises((flight.FlightError, pa.ArrowException)):
                put_bare(bare, unsound_batch(offsets), commit_record())
    assert connection.action("echo", b"alive", timeout_s=TIMEOUT_S) == b"alive"
