"""Mutual TLS for authentication, and roles, proved by certificates, for authorization.

With :class:`Credentials`, the TLS handshake rejects peers that lack a certificate of the job's authority before any
byte of a request is read. Nothing else protects a server against large requests from strangers. A member's
:class:`Role` determines its permissions: each verb lists the roles that may call it (``roles`` of
:class:`~flightedl.rpc.routes.Routes`). A verb without roles cannot be called.

The first subject alternative name of a certificate states the role: ``flightedl://JOB/ROLE``, where JOB is ``*`` for
all jobs of the authority. gRPC verifies the certificate and passes its first name to Flight as the peer's identity.
Further names may follow.

Clients check that a server's certificate contains the name ``flightedl`` (as a later subject alternative name). They do
not check its address, because pods get new addresses. Only certificates for servers contain this name. ``flightedl
certs`` creates all certificates.

Without credentials, anyone who can reach the port has full access. Omit credentials only on loopback.
"""

from __future__ import annotations

import enum
import functools
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from flightedl.adapters.pem_files import FILES, read_file, require_valid
from flightedl.errors import AuthenticationError, UsageError

#: Name that a server's certificate must contain.
SERVER_NAME = "flightedl"
#: Name that stands for all jobs in a certificate.
ANY_JOB = "*"

_SCHEME = "flightedl://"


class Role(enum.StrEnum):
    """Role of a member of a job. There is a certificate for each role."""

    #: Role of masters and pservers, which have full access to each other.
    SERVER = "server"
    #: Role of trainers: they may declare data and model, fetch tasks, push and pull.
    TRAINER = "trainer"
    #: Role of readers: they may read the job's status and pull the model.
    READER = "reader"
    #: Role of operators: they may read the job's status, request checkpoints, change the mode, and retry or drop failed
    #: tasks.
    ADMIN = "admin"


def name_in_certificate(job: str, role: Role) -> str:
    """Return the subject alternative name (a URI) that proves a role in a job; the job "*" stands for all jobs."""
    return f"{_SCHEME}{quote(job, safe='*')}/{role}"


@functools.lru_cache(maxsize=256)
def proven_role(identity: bytes, job: str) -> Role:
    """Return a peer's role in a job, as attested by its verified certificate.

    Args:
        identity: First subject alternative name of the peer's certificate, from Flight.
        job: Name of the server's job.

    Raises:
        AuthenticationError: the certificate proves no role in this job.
    """
    text = identity.decode("ascii", errors="replace")
    named, slash, role = text.removeprefix(_SCHEME).partition("/")
    if not text.startswith(_SCHEME) or not slash or role not in set(Role):
        raise AuthenticationError("your certificate names no role of flightedl: make one with `flightedl certs create`")
    if named != ANY_JOB and unquote(named) != job:
        raise AuthenticationError("your certificate is for another job")
    return Role(role)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials for mutual TLS, PEM-encoded: trusted authorities, and the certificate and key of this process."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    #: File of the certificate; None if it was not read from a file.
    path: Path | None = None

    @classmethod
    def load(cls, directory: str, role: Role) -> Credentials | None:
        """Read ca.pem, cert.pem and key.pem. If ``directory`` is empty, return None, which disables TLS.

        Args:
            directory: Directory with the three files, or with a subdirectory for the role that contains the files.
            role: Role of this process.

        Raises:
            UsageError: a file is missing or is not PEM, or the certificate has expired. The message names it.
        """
        if not directory:
            return None
        place = place_of(directory, role)
        ca, cert, key = (_read_pem(place / name) for name in FILES)
        found = cls(ca, cert, key, place / "cert.pem")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(place / "cert.pem", place / "key.pem")
        except (OSError, ssl.SSLError):
            raise UsageError(f"TLS files of {place}: key.pem does not belong to cert.pem") from None
        require_valid(place / "cert.pem")
        return found


def place_of(directory: str, role: Role) -> Path:
    """Return the directory with a role's files: the subdirectory named after the role, if any, else ``directory``."""
    own = Path(directory) / role
    return own if own.is_dir() else Path(directory)


def pem_files_of(directory: str, role: Role) -> tuple[Path, Path, Path] | None:
    """Return the paths of the CA file, certificate and key of a role, or None if ``directory`` is empty."""
    if not directory:
        return None
    ca, cert, key = (place_of(directory, role) / name for name in FILES)
    return ca, cert, key


def _read_pem(path: Path) -> bytes:
    data = read_file(path, "FLIGHTEDL_TLS_DIR")
    if b"-----BEGIN " not in data:
        raise UsageError(f"TLS file {path} is not PEM")
    return data
