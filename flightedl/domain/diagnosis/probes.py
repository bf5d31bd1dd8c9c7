"""Rules about what was tried out from here: the checkpoints' storage, disks, certificates."""

from __future__ import annotations

from collections.abc import Iterator

from flightedl.domain.diagnosis.findings import Cause, Finding, Severity
from flightedl.domain.diagnosis.observations import Observations, is_full

BROKEN, HARMFUL, NOTE = Severity

#: A small object that takes longer to be written, read or deleted comes from a slow storage.
_SLOW_STORE_S = 2.0
#: Certificates are renewed so early that nobody meets one that is over.
_RENEW_S = 7 * 86_400.0
#: A disk has too little left below this many bytes, or this part of it.
_LITTLE_BYTES = 1 << 30
_LITTLE_PART = 0.02
#: A checkpoint is written before an older one is deleted, so there has to be room for one more, and some.
_ROOM = 1.2


def store(seen: Observations) -> Iterator[Finding]:
    """Whether a small object can be written to the checkpoints' storage, read and deleted, and how long that takes."""
    tried = seen.store
    if tried is None:
        return
    if tried.error:
        cause = Cause.STORE_FULL if is_full(tried.error) else Cause.STORE_FAILS
        yield Finding(
            cause,
            HARMFUL,
            "store",
            f"a small object cannot be written to {tried.url}, read and deleted from here: {tried.error}",
            "Make room there." if cause is Cause.STORE_FULL else "All servers need access to it; so does --resume.",
        )
        return
    slowest = max(tried.seconds, key=lambda what: tried.seconds[what], default="")
    if slowest and tried.seconds[slowest] > _SLOW_STORE_S:
        yield Finding(
            Cause.STORE_SLOW,
            HARMFUL,
            "store",
            f"it took {tried.seconds[slowest]:.1f} s to {slowest} {tried.size_bytes:,} bytes at {tried.url}",
            "It is slow, far away or shared with others; training does not wait for it, recovery does.",
        )
    needed = _ROOM * sum(reply.size_bytes for reply in seen.replies.values())
    if tried.free_bytes is not None and tried.free_bytes < needed:
        yield Finding(
            Cause.DISK_NEARLY_FULL,
            HARMFUL,
            "store",
            f"{tried.url} has {tried.free_bytes / 1e6:,.0f} MB left, and a checkpoint of this job may take "
            f"{needed / 1e6:,.0f} MB",
            "Make room, or keep fewer checkpoints (--checkpoint-keep): one more is written before one is deleted.",
        )


def disks(seen: Observations) -> Iterator[Finding]:
    """Whether there is room for logs and results here."""
    for path, (free, total) in sorted(seen.disks.items()):
        if free < min(_LITTLE_BYTES, _LITTLE_PART * total):
            yield Finding(
                Cause.DISK_NEARLY_FULL,
                HARMFUL,
                "this machine",
                f"the disk of {path} has {free / 1e6:,.0f} MB of {total / 1e9:,.0f} GB left",
                "Logs and results go there; a disk that is full ends processes, and etcd's members first.",
            )


def certificates(seen: Observations) -> Iterator[Finding]:
    """Whether those of servers hold, and for how long."""
    for who, shown in sorted(seen.certificates.items()):
        left_s = None if shown.ends_s is None else shown.ends_s - seen.asker.wall_s
        if shown.error:
            yield Finding(
                Cause.CERTIFICATE_ENDS,
                BROKEN,
                who,
                f"the certificate of {who} is not accepted here: {shown.error}",
                "Make new ones with `flightedl certs renew`, and bring them to all machines; if it has not ended yet, "
                "the clock here or there is wrong, or it is another authority's.",
            )
        elif left_s is not None and left_s < _RENEW_S:
            yield Finding(
                Cause.CERTIFICATE_ENDS,
                HARMFUL,
                who,
                f"the certificate of {who} ends in {left_s / 86_400:.1f} days",
                "Renew it with `flightedl certs renew` while the job runs: processes read it at their next connection, "
                "a server when it is started.",
            )
