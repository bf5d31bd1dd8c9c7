"""Which values carry checksums on their way between a trainer and a pserver.

TCP's own checksum misses one damaged segment in some millions, and a flipped bit arrives as a wrong number. TLS
authenticates every byte, though, and what never leaves the host is not damaged by a network. There a checksum of
the values (xxh3-64, over every byte, on both sides) would take a good part of a step's time for nothing.

What says what the values are (the headers of messages) is always checked. So are values where they are rare: first
values, and pulls apart from steps.
"""

from __future__ import annotations

import ipaddress


def has_checksums(ours: str, theirs: str, *, is_protected: bool) -> bool:
    """Whether values carry checksums, both ways, between two processes with these settings.

    Who wants them always gets them; nobody has to do without them on an unprotected way but by the wish of both.

    Args:
        ours: "auto", "always" or "never".
        theirs: Likewise; another word is one of a newer version, and counts as "always".
        is_protected: Whether TLS protects the bytes, or they never leave the host.
    """
    wishes = {ours, theirs}
    if wishes == {"never"}:
        return False
    return not is_protected if wishes <= {"auto", "never"} else True


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is an address by which nothing leaves the host."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
