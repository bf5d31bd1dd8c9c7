"""A request that was damaged in transit is rejected, and may be sent again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyarrow import flight

from flightedl.errors import CorruptError, DamagedError, UnavailableError
from flightedl.rpc.identity import CHECKSUM_HEADER, check_undamaged, checksum_of

from .rpc_support import BATCH, SCHEMA, Handlers, command, options


def upload(client: flight.FlightClient, request: bytes, chosen: flight.FlightCallOptions) -> None:
    writer, _ = client.do_put(command(request), SCHEMA, chosen)
    writer.write_batch(BATCH)
    writer.close()


def exchange(client: flight.FlightClient, request: bytes, chosen: flight.FlightCallOptions) -> None:
    writer, reader = client.do_exchange(command(request), chosen)
    writer.begin(SCHEMA)
    try:
        reader.read_chunk()
    finally:
        reader.cancel()


REQUESTS: dict[str, Callable[[flight.FlightClient, bytes, flight.FlightCallOptions], object]] = {
    "action": lambda client, request, chosen: list(client.do_action(flight.Action("echo", request), chosen)),
    "get": lambda client, request, chosen: client.do_get(flight.Ticket(request), chosen).read_all(),
    "put": upload,
    "exchange": exchange,
    "info": lambda client, request, chosen: client.get_flight_info(command(request), chosen),
}
#: A request of each kind.
SENT = {"get": b'{"verb": "numbers"}', "put": b'{"verb": "upload"}', "exchange": b'{"verb": "mirror"}'}


def test_every_flipped_bit_of_a_request_is_detected() -> None:
    request = b'{"verb": "tasks", "trainer": "a-1", "finished": [[0, 5, 7]]}'
    header = checksum_of(request)
    check_undamaged(request, header)
    for place in range(8 * len(request)):
        damaged = bytearray(request)
        damaged[place >> 3] ^= 1 << (place & 7)
        with pytest.raises(DamagedError):
            check_undamaged(bytes(damaged), header)


def test_a_request_without_a_checksum_is_accepted() -> None:
    check_undamaged(b"{}", None)


def test_a_damaged_message_raises_a_retryable_error() -> None:
    assert issubclass(DamagedError, CorruptError)
    assert issubclass(DamagedError, UnavailableError)
    assert DamagedError.retryable


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_server_rejects_a_damaged_request_of_any_kind(
    kind: str, bare: flight.FlightClient, handlers: Handlers
) -> None:
    request = SENT.get(kind, b'{"verb": "read"}')
    damaged = options(**{CHECKSUM_HEADER: checksum_of(request.replace(b"e", b"f"))})
    with pytest.raises(flight.FlightError, match="damaged: "):
        REQUESTS[kind](bare, request, damaged)
    assert not handlers.calls
    assert not handlers.streams
