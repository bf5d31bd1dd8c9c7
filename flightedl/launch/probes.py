"""Probes for ``flightedl doctor``: of the checkpoint storage, free disk space, and servers' certificates."""

from __future__ import annotations

import shutil
import socket
import ssl
import uuid
from collections.abc import Callable
from pathlib import Path

from flightedl.adapters.pem_files import FILES
from flightedl.coordination.checkpoint_places import job_storage
from flightedl.domain.data_urls import without_credentials
from flightedl.domain.diagnosis.observations import ShownCertificate, StoreTried
from flightedl.errors import DamagedError, FlightedlError
from flightedl.ports import Clock, Storage

_SIZE_BYTES = 1 << 16
_HANDSHAKE_S = 3.0


def try_store(url: str, job: str, clock: Clock) -> StoreTried:
    """Write a small object next to the job's checkpoints, read it, and delete it. Never raises."""
    shown, seconds = without_credentials(url), dict[str, float]()
    tried = StoreTried(url=shown, size_bytes=_SIZE_BYTES, free_bytes=_free_bytes(url))
    try:
        storage = job_storage(url, job)
        if storage is not None:
            _use(storage, lambda what, start: seconds.update({what: clock.now() - start}), clock)
    except FlightedlError as error:
        return StoreTried(url=shown, size_bytes=_SIZE_BYTES, free_bytes=tried.free_bytes, error=str(error))
    return StoreTried(url=shown, size_bytes=_SIZE_BYTES, free_bytes=tried.free_bytes, seconds=seconds)


def _use(storage: Storage, record: Callable[[str, float], None], clock: Clock) -> None:
    name, content = f"doctor-{uuid.uuid4().hex}", uuid.uuid4().bytes * (_SIZE_BYTES // 16)
    start = clock.now()
    storage.publish(name, [content])
    record("write", start)
    try:
        start = clock.now()
        if storage.read(name) != content:
            raise DamagedError("the file has other content than was written")
        record("read", start)
    finally:
        start = clock.now()
        storage.delete(name)
    record("delete", start)


def _free_bytes(url: str) -> int | None:
    """Return the free space of a directory or its nearest existing parent. None if the URL is not a local path."""
    if "://" in url and not url.startswith("file://"):
        return None
    found = disk_of(Path(url.removeprefix("file://")))
    return None if found is None else found[0]


def disk_of(path: Path) -> tuple[int, int] | None:
    """Return (free bytes, total bytes) of the disk for a path, which need not exist. None if unknown."""
    for place in (path.absolute(), *path.absolute().parents):
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            continue
        return usage.free, usage.total
    return None


def certificate_of(address: str, place: Path, server_name: str) -> ShownCertificate:
    """Connect to a TLS server with the certificate in a directory. Return the server's certificate. Never raises."""
    ca, cert, key = (str(place / name) for name in FILES)
    host, _, port = address.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(cert, key)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=_HANDSHAKE_S) as plain,
            context.wrap_socket(plain, server_hostname=server_name) as secured,
        ):
            shown = secured.getpeercert()
    except ssl.SSLCertVerificationError as error:
        return ShownCertificate(error=error.verify_message)
    except (OSError, ValueError):
        # Another finding reports that the server is unreachable.
        return ShownCertificate()
    ends = None if shown is None else shown.get("notAfter")
    return ShownCertificate(ends_s=float(ssl.cert_time_to_seconds(ends)) if isinstance(ends, str) else None)
