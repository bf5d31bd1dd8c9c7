"""The files by which a process proves what it is, to servers of the job and to etcd: authority, certificate, key."""

from __future__ import annotations

from pathlib import Path

from flightedl.errors import UsageError

#: What makes up a directory of credentials: the authorities, the certificate, its key.
FILES = ("ca.pem", "cert.pem", "key.pem")


def read_file(path: Path, setting: str) -> bytes:
    """The content of a file.

    Raises:
        UsageError: it cannot be read; names it, and the setting that says where it is.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"TLS file {path} cannot be read ({error.strerror}): correct {setting}") from None
