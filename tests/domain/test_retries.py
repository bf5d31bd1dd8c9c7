"""Errors worth another attempt, and for how long they are retried."""

from __future__ import annotations

import errno

import pytest

from flightedl.domain.retries import Patience, is_transient
from flightedl.errors import (
    CorruptError,
    DataError,
    DeadlineError,
    FencedError,
    NotReadyError,
    ReplacedError,
    UnavailableError,
    UnregisteredError,
)


class ClientResponseError(Exception):
    """An error like aiohttp's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


class NoCredentialsError(Exception):
    """An error like botocore's."""


class EndpointConnectionError(Exception):
    """An error like botocore's."""


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError(),
        NotReadyError(),
        DeadlineError(),
        ReplacedError(),
        UnregisteredError(),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError(),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EBUSY, "replaced"),
        OSError("no number"),
        EndpointConnectionError(),
        ClientResponseError(429),
        ClientResponseError(503),
        MemoryError(),
    ],
    ids=repr,
)
def test_errors_that_may_pass_are_retried(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        DataError(),
        CorruptError(),
        FencedError(),
        FileNotFoundError(),
        PermissionError(),
        IsADirectoryError(),
        OSError(errno.ENAMETOOLONG, "File name too long"),
        NoCredentialsError(),
        ClientResponseError(403),
        KeyError("a bug"),
        ValueError("a bug"),
    ],
    ids=repr,
)
def test_permanent_errors_are_not_retried(error: Exception) -> None:
    assert not is_transient(error)


def test_pauses_double_up_to_the_longest_and_end_at_the_limit() -> None:
    patience = Patience(limit_s=10.0, first_pause_s=1.0, longest_pause_s=3.0)
    error = TimeoutError()
    assert [patience.pause_s(error, failures, 0.0) for failures in (1, 2, 3, 4, 5000)] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert patience.pause_s(error, 3, 7.0) == 3.0
    assert patience.pause_s(error, 3, 7.1) is None
    assert patience.pause_s(DataError(), 1, 0.0) is None
