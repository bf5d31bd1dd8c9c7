"""Files that authenticate a process to the job's servers and to etcd: authorities, certificate and key."""

from __future__ import annotations

import datetime as dt
import logging
import ssl
from pathlib import Path

from flightedl.errors import UsageError

_log = logging.getLogger(__name__)

#: Files in a directory of credentials: the authorities, the certificate, and its key.
FILES = ("ca.pem", "cert.pem", "key.pem")
#: Time before a certificate expires in which processes warn about it.
_RENEW = dt.timedelta(days=7)


def read_file(path: Path, setting: str) -> bytes:
    """Return the content of a file. Raises UsageError with the file and its setting if the file is unreadable."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"TLS file {path} cannot be read ({error.strerror}): correct {setting}") from None


def require_valid(path: Path) -> None:
    """Check that a certificate is valid now. Warn if it expires within seven days.

    Raises:
        UsageError: the certificate has expired, is not valid yet, or cannot be decoded.
    """
    try:
        shown = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined] # noqa: SLF001 - there is no public one
        begins, ends = (
            dt.datetime.fromtimestamp(ssl.cert_time_to_seconds(shown[name]), dt.UTC)
            for name in ("notBefore", "notAfter")
        )
    except (OSError, ValueError, KeyError):
        raise UsageError(f"TLS file {path} has no certificate that can be decoded") from None
    now = dt.datetime.now(dt.UTC)
    if now < begins:
        raise UsageError(f"the certificate {path} is valid from {begins:%Y-%m-%d} on: correct this machine's clock")
    remedy = "run `flightedl certs renew`, and distribute the certificates to all machines"
    if now >= ends:
        raise UsageError(f"the certificate {path} expired on {ends:%Y-%m-%d}: {remedy}")
    if now >= ends - _RENEW:
        _log.warning("the certificate %s expires on %s: %s", path, f"{ends:%Y-%m-%d}", remedy)
