"""Dialogues: many tickets over one stream, each with the checks of a call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from pyarrow import flight
from rpc_support import BATCH, CALLER, IDENTITY, SCHEMA, TIMEOUT_S, Handlers, command, eventually, options

from flightedl.errors import (
    BusyError,
    DamagedError,
    FencedError,
    MessageError,
    NotReadyError,
    OutcomeUnknownError,
    UnavailableError,
)
from flightedl.rpc import Connection, FlightServer, Limits, ServerIdentity
from flightedl.rpc.dialogue import Dialogue
from flightedl.rpc.identity import sealed, unsealed
from flightedl.rpc.routes import NO_COLUMNS
from flightedl.testing.clock import FakeClock

WHOLE = b'{"verb": "whole"}'
NOTHING = b'{"verb": "whole", "what": "nothing"}'


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def dialogue(clock: FakeClock) -> Iterator[Dialogue]:
    made = Dialogue("whole", clock)
    yield made
    made.rest()


def test_one_stream_carries_many_tickets(
    dialogue: Dialogue, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    for _ in range(3):
        batches, text = dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
        assert [batch.num_rows for batch in batches] == [3, 1]
        assert batches[0].equals(BATCH)
        assert text == b'{"all": true}'
        assert dialogue.ask(connection, NOTHING, timeout_s=TIMEOUT_S) == ([], b'{"all": true}')
    assert handlers.tickets == [WHOLE, NOTHING] * 3
    assert server.running_calls == 1
    dialogue.rest()
    eventually(lambda: server.running_calls == 0, "the stream ends when it is let go of")
    assert server.refusals == {}
    assert dialogue.ask(connection, NOTHING, timeout_s=TIMEOUT_S) == ([], b'{"all": true}')
    assert dialogue.is_open


def test_an_answer_without_batches_may_come_first(dialogue: Dialogue, connection: Connection) -> None:
    assert dialogue.ask(connection, NOTHING, timeout_s=TIMEOUT_S)[0] == []
    assert len(dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)[0]) == 2


def test_an_error_is_ours_and_ends_the_stream(
    dialogue: Dialogue, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    handlers.failures = [BusyError("come back later")]
    with pytest.raises(BusyError, match="come back later"):
        dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    assert not dialogue.is_open
    eventually(lambda: server.running_calls == 0, "the stream ends with the error")
    handlers.failures = []
    assert dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)[1] == b'{"all": true}'


def test_each_ticket_is_refused_by_a_server_that_serves_no_more(
    dialogue: Dialogue, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    server.stop_serving()
    with pytest.raises(NotReadyError):
        dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    assert len(handlers.tickets) == 1


def test_a_stop_ends_the_dialogue_at_its_next_ticket(
    dialogue: Dialogue, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    server.closing.set()
    with pytest.raises(NotReadyError, match="stopping"):
        dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    assert len(handlers.tickets) == 1


def test_it_is_meant_for_one_generation(dialogue: Dialogue, server: FlightServer, handlers: Handlers) -> None:
    other = ServerIdentity(IDENTITY.job, IDENTITY.role, IDENTITY.index, IDENTITY.generation + 1)
    with (
        Connection(server.address, expected=other, caller=CALLER) as connection,
        pytest.raises(FencedError),
    ):
        dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    assert handlers.tickets == []


def test_another_connection_and_old_age_open_another_stream(
    dialogue: Dialogue, clock: FakeClock, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    def streams() -> int:
        return len({id(call) for call in handlers.calls})

    dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    clock.advance(4.9)
    dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    assert streams() == 1
    clock.advance(0.2)
    dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
    assert streams() == 2
    dialogue.ask(connection, WHOLE, timeout_s=2 * TIMEOUT_S + 0.1)
    assert streams() == 3
    with Connection(server.address, expected=IDENTITY, caller=CALLER) as other:
        dialogue.ask(other, WHOLE, timeout_s=TIMEOUT_S)
        assert streams() == 4
        eventually(lambda: server.running_calls == 1, "those before have ended")
        dialogue.rest()


def test_a_stream_whose_server_died_has_an_unknown_outcome_and_the_next_ticket_goes_to_its_successor(
    dialogue: Dialogue, connection: Connection
) -> None:
    program = """
import sys
from rpc_support import Handlers, IDENTITY
from flightedl.adapters.clock import SystemClock
from flightedl.rpc import FlightServer
server = FlightServer(Handlers().routes(), IDENTITY, clock=SystemClock())
server.start_serving(IDENTITY)
print(server.address, flush=True)
sys.stdin.read()
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        with Connection(child.stdout.readline().strip(), expected=IDENTITY) as to_child:
            dialogue.ask(to_child, WHOLE, timeout_s=TIMEOUT_S)
            child.kill()
            child.wait()
            with pytest.raises(OutcomeUnknownError):
                dialogue.ask(to_child, WHOLE, timeout_s=TIMEOUT_S)
            with pytest.raises((UnavailableError, OutcomeUnknownError)):
                dialogue.ask(to_child, WHOLE, timeout_s=TIMEOUT_S)
    assert dialogue.ask(connection, NOTHING, timeout_s=TIMEOUT_S) == ([], b'{"all": true}')


def test_a_ticket_that_takes_too_long_ends_with_the_stream(
    serve: Callable[..., FlightServer], handlers: Handlers, dialogue: Dialogue
) -> None:
    server = serve(handlers.routes(), limits=Limits(stream_s=0.3, sever_after_s=0.1))
    with Connection(server.address, expected=IDENTITY, caller=CALLER) as connection:
        dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
        eventually(lambda: server.running_calls == 0, "the server ends what outlives its limit", 10.0)
        with pytest.raises((OutcomeUnknownError, UnavailableError)):
            dialogue.ask(connection, WHOLE, timeout_s=TIMEOUT_S)
        assert dialogue.ask(connection, NOTHING, timeout_s=TIMEOUT_S)[1] == b'{"all": true}'


@pytest.mark.parametrize(
    ("verb", "message", "error"),
    [
        ("whole", b"0" * 16 + WHOLE, "damaged"),
        ("whole", b"short", "damaged"),
        ("whole", b"\xff" * 40, "damaged"),
        ("whole", BATCH, "schema is"),
        ("numbers", sealed(b'{"verb": "numbers"}'), "use DoGet"),
        ("unknown", sealed(WHOLE), "unknown verb"),
    ],
)
def test_what_is_no_ticket_is_refused(
    verb: str, message: object, error: str, bare: flight.FlightClient, server: FlightServer, handlers: Handlers
) -> None:
    writer, reader = bare.do_exchange(command(f'{{"verb": "{verb}"}}'.encode()), options())
    with pytest.raises(flight.FlightError, match=error):
        _say(writer, reader, message)
    with pytest.raises(flight.FlightError):
        writer.close()
    assert handlers.tickets == []
    eventually(lambda: server.running_calls == 0, "the stream ended")


def _say(writer: flight.FlightStreamWriter, reader: flight.FlightStreamReader, message: object) -> None:
    """Refused at any of these: the server does not wait for the next."""
    writer.begin(NO_COLUMNS if isinstance(message, bytes) else SCHEMA)
    if isinstance(message, bytes):
        writer.write_metadata(message)
    else:
        writer.write_batch(message)
    reader.read_chunk()


def test_an_exchange_of_the_same_name_goes_first(bare: flight.FlightClient) -> None:
    writer, reader = bare.do_exchange(command(b'{"verb": "mirror"}'), options())
    writer.begin(SCHEMA)
    writer.write_metadata(b"hello")
    assert reader.read_chunk().app_metadata.to_pybytes() == b"hello"
    writer.done_writing()
    with pytest.raises(flight.FlightError, match="broke off"):
        writer.close()


def test_sealing_shows_every_flipped_bit() -> None:
    message = sealed(WHOLE)
    assert unsealed(message) == WHOLE
    for number in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[number // 8] ^= 1 << number % 8
        with pytest.raises(DamagedError):
            unsealed(bytes(damaged))


def test_a_dialogue_about_something_else_than_a_whole_answer(clock: FakeClock, connection: Connection) -> None:
    numbers = Dialogue("numbers", clock)
    with pytest.raises(MessageError, match="use DoGet"):
        numbers.ask(connection, b'{"verb": "numbers"}', timeout_s=TIMEOUT_S)
    assert not numbers.is_open
