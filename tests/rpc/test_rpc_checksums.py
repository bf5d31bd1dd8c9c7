"""A request that was damaged in transit is rejected, and may be sent again."""

from __future__ import annotations

import pytest

from flightedl.errors import CorruptError, DamagedError, UnavailableError
from flightedl.rpc.identity import check_undamaged, checksum_of


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
