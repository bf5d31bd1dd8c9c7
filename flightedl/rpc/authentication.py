"""Who may talk to a server, and what it may ask: mutual TLS, and the role that a certificate proves.

With :class:`Credentials` the TLS handshake refuses whoever has no certificate of the job's authority, before a single
byte of a request is read; that is the only protection from big requests of strangers. What a member may then ask is
decided by its :class:`Role`, and each verb names the roles that it is open to (``roles`` of
:class:`~flightedl.rpc.routes.Routes`): a verb that names none is closed.

The role stands in the certificate, as its first subject alternative name: ``flightedl://JOB/ROLE``, where JOB is ``*``
for all jobs of the authority. gRPC hands the first name of a verified certificate to Flight, which shows it to a
handler as the peer's identity. Other names may follow.

Servers are checked by the name ``flightedl`` in their certificate (a later subject alternative name), not by their
address: pods get new addresses, names of roles don't change. Only certificates of servers have that name.
``flightedl certs`` makes all of this.

Without credentials everybody who reaches the port may ask everything: fine on loopback, and nowhere else.
"""

from __future__ import annotations

import enum
import functools
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from flightedl.adapters.pem_files import FILES, read_file
from flightedl.errors import AuthenticationError, UsageError

#: The name that a server's certificate must carry.
SERVER_NAME = "flightedl"
#: In place of a job's name: all jobs.
ANY_JOB = "*"

_SCHEME = "flightedl://"


class Role(enum.StrEnum):
    """What a member of a job is. Each has a certificate of its own."""

    #: Masters and pservers: they may ask each other everything.
    SERVER = "server"
    #: Declares data and model, fetches tasks, pushes and pulls.
    TRAINER = "trainer"
    #: Sees how the job stands, and pulls the model.
    READER = "reader"
    #: Sees how the job stands, orders checkpoints, changes the mode, decides on failed tasks.
    ADMIN = "admin"


def name_in_certificate(job: str, role: Role) -> str:
    """The subject alternative name (a URI) that proves a role in a job; job "*": in all of them."""
    return f"{_SCHEME}{quote(job, safe='*')}/{role}"


@functools.lru_cache(maxsize=256)
def proven_role(identity: bytes, job: str) -> Role:
    """The role that a verified certificate proves in a job.

    Args:
        identity: The first subject alternative name of the peer's certificate, as Flight gives it.
        job: The server's job.

    Raises:
        AuthenticationError: it proves none.
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
    """Mutual TLS, PEM-encoded: the authorities that both sides trust, and this process's certificate and key."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, directory: str, role: Role) -> Credentials | None:
        """Read ca.pem, cert.pem and key.pem; None when ``directory`` is empty (plain text).

        Args:
            directory: Has the three files, or a directory named like the role that has them.
            role: What this process is.

        Raises:
            UsageError: a file is missing or holds no PEM; names it.
        """
        if not directory:
            return None
        place = place_of(directory, role)
        found = cls(*(_read_pem(place / name) for name in FILES))
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(place / "cert.pem", place / "key.pem")
        except (OSError, ssl.SSLError):
            raise UsageError(f"TLS files of {place}: key.pem does not belong to cert.pem") from None
        return found


def place_of(directory: str, role: Role) -> Path:
    """Where the files of a role lie: in a directory of its own, else in ``directory`` itself."""
    own = Path(directory) / role
    return own if own.is_dir() else Path(directory)


def pem_files_of(directory: str, role: Role) -> tuple[Path, Path, Path] | None:
    """Return the paths of a role's authorities, certificate and key. None without a directory."""
    if not directory:
        return None
    ca, cert, key = (place_of(directory, role) / name for name in FILES)
    return ca, cert, key


def _read_pem(path: Path) -> bytes:
    data = read_file(path, "FLIGHTEDL_TLS_DIR")
    if b"-----BEGIN " not in data:
        raise UsageError(f"TLS file {path} is not PEM")
    return data
