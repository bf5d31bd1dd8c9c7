"""How etcd is reached: where it is, and by what this process proves that it may come in.

* Without anything: plain text, for an etcd on loopback or in a network that only the job can reach.
* With a directory of certificates: TLS, and the certificate in it as this process's own. etcd with
  ``--client-cert-auth`` and authentication takes the certificate's common name as the user.
* With a user and a file that holds the password, over TLS: the password is exchanged for a token, again whenever etcd
  does not know the token any more, as after a restart.

Files are read for each new connection, so what was renewed is used without a restart.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import etcd3.etcdrpc as rpc
import grpc  # type: ignore[import-untyped]

from flightedl.adapters.pem_files import FILES, read_file
from flightedl.config import CommonSettings

_TOKEN_HEADER = "token"  # noqa: S105 - the name of a header
_REPLY_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Where etcd is, and as whom this process comes in.

    Attributes:
        endpoints: ``host:port``, several separated by commas.
        tls_dir: Directory with ca.pem, cert.pem and key.pem; empty: plain text.
        user: Who comes in by a password; empty: nobody.
        password_file: Holds the user's password.
    """

    endpoints: str
    tls_dir: str = ""
    user: str = ""
    password_file: str = ""

    @classmethod
    def of(cls, chosen: CommonSettings) -> Self:
        """As the settings say."""
        return cls(chosen.etcd, chosen.etcd_tls_dir, chosen.etcd_user, chosen.etcd_password_file)

    @property
    def each_endpoint(self) -> tuple[str, ...]:
        """``host:port`` of each."""
        return tuple(part.strip() for part in self.endpoints.split(",") if part.strip())

    def channel(self, endpoint: str, timeout_s: float) -> Any:
        """A gRPC channel to one endpoint, not shared with any other, whose calls come in as this process.

        Raises:
            UsageError: a file cannot be read; names it.
        """
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 500),
            # Connecting is given up before the call is, so that the call's error says that nothing was sent.
            ("grpc.min_reconnect_backoff_ms", int(timeout_s * 500)),
            ("grpc.max_receive_message_length", _REPLY_LIMIT_BYTES),
            ("grpc.enable_http_proxy", 0),
        )
        if not self.tls_dir:
            return grpc.insecure_channel(endpoint, options=options)
        ca, cert, key = (read_file(Path(self.tls_dir) / name, "FLIGHTEDL_ETCD_TLS_DIR") for name in FILES)
        channel = grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(ca, key, cert), options=options)
        if not self.user:
            return channel
        password = read_file(Path(self.password_file), "FLIGHTEDL_ETCD_PASSWORD_FILE").decode().rstrip("\r\n")
        return grpc.intercept_channel(channel, _WithToken(channel, self.user, password, timeout_s))


class _Details(
    collections.namedtuple(  # noqa: PYI024 - gRPC looks these up by name, and types nothing
        "_Details", ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")
    ),
    grpc.ClientCallDetails,  # type: ignore[misc]
):
    """What a call is sent with."""


class _WithToken(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    """Adds the token to each call; asks for one at the first, and after one was refused."""

    def __init__(self, channel: Any, user: str, password: str, timeout_s: float) -> None:
        self._login = rpc.AuthStub(channel)
        self._request = rpc.AuthenticateRequest(name=user, password=password)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._token = ""

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        call = continuation(self._proven(details), request)
        if not _is_token_refused(call.exception()):
            return call
        with self._lock:
            self._token = ""
        return continuation(self._proven(details), request)

    def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Iterator[Any]) -> Any:
        # A watch opens a connection of its own, with a token of its own.
        return continuation(self._proven(details), requests)

    def _proven(self, details: Any) -> _Details:
        with self._lock:
            if not self._token:
                self._token = self._login.Authenticate(self._request, timeout=self._timeout_s).token
            token = self._token
        metadata = [*(details.metadata or ()), (_TOKEN_HEADER, token)]
        return _Details(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )


def _is_token_refused(error: Any) -> bool:
    """Refused before anything was done: asking again with another token is safe."""
    if not isinstance(error, grpc.RpcError):
        return False
    code, details = error.code(), error.details() or ""
    return (code is grpc.StatusCode.UNAUTHENTICATED and "invalid auth token" in details) or (
        code is grpc.StatusCode.INVALID_ARGUMENT and "revision of auth store is old" in details
    )
