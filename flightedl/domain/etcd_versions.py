"""Versions of etcd that keep the writes that they have acknowledged."""

from __future__ import annotations

#: Major, minor and patch number. Empty if the version is unknown.
Version = tuple[int, ...]

#: First patch release of each minor version without known errors in clusters of several members.
_OF_SEVERAL = {(3, 4): 42, (3, 5): 28, (3, 6): 9}
_NEWEST = max(_OF_SEVERAL)


def version_of(text: str) -> Version:
    """Parse a version such as "3.5.28" or "3.6.0-rc.1". Return an empty tuple for any other text."""
    parts = text.partition("-")[0].split(".")
    return tuple(map(int, parts)) if len(parts) == 3 and all(part.isdecimal() for part in parts) else ()


def is_sound(version: Version, member_count: int = 1) -> bool:
    """True if members of this version keep acknowledged writes when members are killed or cut off."""
    if member_count > 1:
        minor = version[:2]
        return minor > _NEWEST or (minor in _OF_SEVERAL and version[2] >= _OF_SEVERAL[minor])
    return version >= (3, 4, 23) and not (3, 5, 0) <= version < (3, 5, 3)


def warning_about(version: Version, member_count: int, address: str) -> str:
    """Return a warning about an etcd, or an empty string if there is nothing to warn about.

    A single member on the loopback interface belongs to a job on one machine; the job's launcher has already warned.
    """
    is_local = member_count == 1 and address.startswith(("127.", "localhost:", "[::1]"))
    if not version or is_local or is_sound(version, member_count):
        return ""
    named = f"etcd {'.'.join(map(str, version))} at {address}"
    if member_count == 1:
        return (
            f"{named} may lose acknowledged writes when it is killed, and batches then count twice or not at all. "
            "Update it to 3.4.23, 3.5.3 or newer"
        )
    return (
        f"{named}, one of {member_count} members, may lose acknowledged writes or end live leases when a member is "
        "killed or cut off, and batches then count twice or not at all. Update all members to 3.4.42, 3.5.28, 3.6.9 "
        "or newer"
    )
