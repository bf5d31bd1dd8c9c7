"""Rules about the checkpoint storage, disks and certificates, which this machine checks itself."""

from __future__ import annotations

from collections.abc import Iterator

from flightedl.domain.diagnosis.findings import Cause, Finding, Severity
from flightedl.domain.diagnosis.observations import Observations, is_full

BROKEN, HARMFUL, NOTE = Severity

#: A storage is considered slow if writing, reading or deleting a small object takes longer than this many seconds.
_SLOW_STORE_S = 2.0
#: A warning is given if a certificate expires within this many seconds.
_RENEW_S = 7 * 86_400.0
#: A disk counts as nearly full if its free space is below both this many bytes and this fraction of its size.
_LITTLE_BYTES = 1 << 30
_LITTLE_PART = 0.02
#: Required free space as a multiple of a checkpoint's size. A new checkpoint is written before an old one is deleted.
_ROOM = 1.2


def store(seen: Observations) -> Iterator[Finding]:
    """Check that this machine can use the checkpoint storage, and that the storage is fast enough."""
    tried = seen.store
    if tried is None:
        return
    if tried.error:
        cause = Cause.STORE_FULL if is_full(tried.error) else Cause.STORE_FAILS
        yield Finding(
            cause,
            HARMFUL,
            "store",
            f"this machine cannot write, read and delete a small object at {tried.url}: {tried.error}",
            "Free some space there."
            if cause is Cause.STORE_FULL
            else "Grant access to it: all servers and --resume need it.",
        )
        return
    slowest = max(tried.seconds, key=lambda what: tried.seconds[what], default="")
    if slowest and tried.seconds[slowest] > _SLOW_STORE_S:
        yield Finding(
            Cause.STORE_SLOW,
            HARMFUL,
            "store",
            f"it took {tried.seconds[slowest]:.1f} s to {slowest} {tried.size_bytes:,} bytes at {tried.url}",
            "The storage is slow, distant or shared. Training does not wait for it, but recovery does.",
        )
    needed = _ROOM * sum(reply.size_bytes for reply in seen.replies.values())
    if tried.free_bytes is not None and tried.free_bytes < needed:
        yield Finding(
            Cause.DISK_NEARLY_FULL,
            HARMFUL,
            "store",
            f"{tried.url} has {tried.free_bytes / 1e6:,.0f} MB left, but a checkpoint of this job may need "
            f"{needed / 1e6:,.0f} MB",
            "Free some space, or keep fewer checkpoints (--checkpoint-keep). New ones are written before old ones go.",
        )


def disks(seen: Observations) -> Iterator[Finding]:
    """Check that this machine's disks have space for logs and results."""
    for path, (free, total) in sorted(seen.disks.items()):
        if free < min(_LITTLE_BYTES, _LITTLE_PART * total):
            yield Finding(
                Cause.DISK_NEARLY_FULL,
                HARMFUL,
                "this machine",
                f"the disk of {path} has {free / 1e6:,.0f} MB of {total / 1e9:,.0f} GB left",
                "Free some space: a full disk loses logs and results and stops processes, etcd's members first.",
            )


def certificates(seen: Observations) -> Iterator[Finding]:
    """Check that the servers' certificates are valid and do not expire soon."""
    for who, shown in sorted(seen.certificates.items()):
        left_s = None if shown.ends_s is None else shown.ends_s - seen.asker.wall_s
        if shown.error:
            yield Finding(
                Cause.CERTIFICATE_ENDS,
                BROKEN,
                who,
                f"this machine rejects the certificate of {who}: {shown.error}",
                "If it has expired, run `flightedl certs renew` and distribute the certificates to all machines. "
                "Otherwise one of the two clocks is wrong, or another authority issued the certificate.",
            )
        elif left_s is not None and left_s < _RENEW_S:
            yield Finding(
                Cause.CERTIFICATE_ENDS,
                HARMFUL,
                who,
                f"the certificate of {who} expires in {left_s / 86_400:.1f} days",
                "Run `flightedl certs renew`; the job may keep running. Trainers and tools read the new certificates "
                "when they next connect, servers when they restart.",
            )
