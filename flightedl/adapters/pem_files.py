"""Files that authenticate a process to the job's servers and to etcd: authorities, certificate and key."""

from __future__ import annotations

from pathlib import Path

from flightedl.errors import UsageError

#: Files in a directory of credentials: the authorities, the certificate, and its key.
FILES = ("ca.pem", "cert.pem", "key.pem")


def read_file(path: Path, setting: str) -> bytes:
    """Return the content of a file. Raises UsageError with the file and its setting if the file is unreadable."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"TLS file {path} cannot be read ({error.strerror}): correct {setting}") from None
