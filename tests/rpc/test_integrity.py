"""Checksums of values: either side can request them, and unprotected connections use them by default."""

from __future__ import annotations

import itertools

import pytest

from flightedl.config import INTEGRITIES, is_loopback
from flightedl.rpc.authentication import Role
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller
from flightedl.rpc.integrity import has_checksums


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(INTEGRITIES, INTEGRITIES)))
@pytest.mark.parametrize("is_protected", [False, True])
def test_either_side_can_request_checksums(ours: str, theirs: str, is_protected: bool) -> None:
    found = has_checksums(ours, theirs, is_protected=is_protected)
    assert found == has_checksums(theirs, ours, is_protected=is_protected)
    if "always" in {ours, theirs}:
        assert found
    elif {ours, theirs} == {"never"}:
        assert not found
    else:
        assert found is not is_protected


def test_an_unknown_setting_of_a_newer_version_means_checksums() -> None:
    assert has_checksums("never", "crc", is_protected=True)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:1", True), ("127.3.2.1:80", True), ("[::1]:5", True), ("10.0.0.1:7", False), ("localhost:1", False)],
)
def test_only_numeric_loopback_addresses_stay_on_the_host(address: str, expected: bool) -> None:
    assert is_loopback(address.rpartition(":")[0]) is expected


@pytest.mark.parametrize(
    ("address", "ours", "theirs", "expected"),
    [
        ("127.0.0.1:1", "auto", "auto", False),
        ("127.0.0.1:1", "auto", "always", True),
        ("127.0.0.1:1", "always", "never", True),
        ("192.0.2.1:1", "auto", "auto", True),
        ("192.0.2.1:1", "never", "never", False),
    ],
)
def test_a_connection_knows_whether_it_has_checksums(address: str, ours: str, theirs: str, expected: bool) -> None:
    connector = Connector(Caller("trainer", "t"), Role.TRAINER, integrity=ours)
    with connector.connect(address, None, theirs) as connection:
        assert connection.has_checksums is expected
