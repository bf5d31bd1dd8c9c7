"""Who may talk to a server: mutual TLS, and a token for each role where that is wanted.

With :class:`Credentials` the TLS handshake refuses whoever has no certificate of the job's authority, before a single
byte of a request is read; that is the only protection from big requests of strangers. Python does not show a handler
which certificate it was, so a role is proven by a token (:class:`Tokens`), if at all.

Without either, everybody who reaches the port may ask: fine on loopback or behind a network policy, and nowhere else.

Servers are checked by the name ``flightedl`` in their certificate (subject alternative name), not by their address:
pods get new addresses, names of roles don't change. Give that name to servers' certificates and not to trainers'.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flightedl.errors import AuthenticationError, UsageError
from flightedl.rpc.identity import AUTHORIZATION_HEADER, Caller

#: The name that a server's certificate must carry.
SERVER_NAME = "flightedl"

_TOKEN_LIMIT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Credentials:
    """Mutual TLS, PEM-encoded: the authority that both sides trust, and this process's certificate and key."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, directory: str) -> Credentials | None:
        """Read ca.pem, cert.pem and key.pem of a directory; None when ``directory`` is empty (plain text).

        Raises:
            UsageError: a file is missing or holds no PEM; names it.
        """
        if not directory:
            return None
        return cls(*(_read_pem(Path(directory) / name) for name in ("ca.pem", "cert.pem", "key.pem")))


def _read_pem(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"TLS file {path} cannot be read ({error.strerror}): set FLIGHTEDL_TLS_DIR rightly") from None
    if b"-----BEGIN " not in data:
        raise UsageError(f"TLS file {path} is not PEM")
    return data


@dataclass(frozen=True, slots=True)
class Tokens:
    """A secret for each role. A call has to name a role and to bring that role's token."""

    by_role: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        for role, token in self.by_role.items():
            if not token or not token.isascii() or len(token) > _TOKEN_LIMIT_BYTES:
                raise UsageError(f"the token of role {role!r} must be 1 to {_TOKEN_LIMIT_BYTES} ASCII characters")

    def check(self, caller: Caller, headers: Mapping[str, Sequence[str | bytes]]) -> None:
        """AuthenticationError unless the caller proves its role."""
        values = headers.get(AUTHORIZATION_HEADER, ())
        given = values[0] if len(values) == 1 else ""
        wanted = self.by_role.get(caller.role)
        is_proven = isinstance(given, str) and hmac.compare_digest(
            given.encode(errors="replace"), f"Bearer {wanted}".encode()
        )
        if wanted is None or not is_proven:
            raise AuthenticationError("this server wants a role and its token, and got no valid ones")
