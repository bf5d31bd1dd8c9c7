"""Checksums of the values that trainers and pservers exchange.

TCP's checksum misses one damaged segment in several million, and a flipped bit would then be a wrong number. Therefore
values carry checksums (xxh3-64). The exceptions are connections with TLS, which authenticates every byte, and values
that never leave the host. There, checksums would take a large part of a step's time for nothing.

Headers of messages always have checksums. So do initial values and pulls outside of steps, which are rare.
"""

from __future__ import annotations

import ipaddress


def has_checksums(ours: str, theirs: str, *, is_protected: bool) -> bool:
    """Return True if values carry checksums, in both directions, between two processes with these settings.

    If either process has "always", they do. On an unprotected connection they lack checksums only if both have "never".

    Args:
        ours: "auto", "always" or "never".
        theirs: Setting of the peer. An unknown one is of a newer version, and counts as "always".
        is_protected: True if TLS protects the bytes, or they never leave the host.
    """
    wishes = {ours, theirs}
    if wishes == {"never"}:
        return False
    return not is_protected if wishes <= {"auto", "never"} else True


def is_loopback(address: str) -> bool:
    """Return True if ``host:port`` is a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
