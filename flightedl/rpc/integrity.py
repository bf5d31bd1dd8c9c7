"""Policy for checksums of the values that trainers and pservers exchange.

TCP's checksum misses one damaged segment in several million, and a flipped bit would become a wrong number. Therefore
values have checksums (xxh3-64), with two exceptions: TLS already authenticates every byte, and values within one host
never cross a network. In these cases, checksums would cost a large part of a step's time without benefit.

Headers of messages always have checksums. Initial values and pulls outside of steps have them, too, because they are
rare.
"""

from __future__ import annotations


def has_checksums(ours: str, theirs: str, *, is_protected: bool) -> bool:
    """Return True if two processes with these settings add checksums to the values that they exchange.

    If either process has the setting "always", values have checksums. On an unprotected connection, values have none
    only if both processes have the setting "never".

    Args:
        ours: "auto", "always" or "never".
        theirs: Setting of the peer. An unknown setting belongs to a newer version, and counts as "always".
        is_protected: True if TLS protects the bytes, or if they never leave the host.
    """
    wishes = {ours, theirs}
    if wishes == {"never"}:
        return False
    return not is_protected if wishes <= {"auto", "never"} else True
