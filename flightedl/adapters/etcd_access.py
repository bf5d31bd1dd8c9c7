"""Address of etcd, and the credentials of this process.

* Without credentials, connections use plain text. This is for an etcd on loopback, or in a network that only the job
  can reach.
* With a directory of certificates, connections use TLS and this process's certificate. If etcd has
  ``--client-cert-auth`` and authentication enabled, the certificate's common name is the user.
* With a user and a password file, connections use TLS, and the password is exchanged for a token. If etcd rejects the
  token, for example after a restart, the password is exchanged again.

Files are read for each new connection, so renewed files take effect without a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flightedl.adapters.pem_files import FILES, read_file, require_valid
from flightedl.config import CommonSettings

_REPLY_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Address of etcd, and the credentials of this process.

    Attributes:
        endpoints: ``host:port``, or a comma-separated list.
        tls_dir: Directory with ca.pem, cert.pem and key.pem; empty for plain text.
        user: Name of a user with a password; empty if there is none.
        password_file: File with the user's password.
    """

    endpoints: str
    tls_dir: str = ""
    user: str = ""
    password_file: str = ""

    @classmethod
    def of(cls, chosen: CommonSettings) -> Self:
        """Return the access that the settings describe. Raises UsageError if the certificate has expired."""
        if chosen.etcd_tls_dir:
            require_valid(Path(chosen.etcd_tls_dir) / "cert.pem")
        return cls(chosen.etcd, chosen.etcd_tls_dir, chosen.etcd_user, chosen.etcd_password_file)

    @property
    def each_endpoint(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.endpoints.split(",") if part.strip())

    def channel(self, endpoint: str, timeout_s: float) -> Any:
        """Return a new gRPC channel to one endpoint, with the credentials of this process.

        Raises:
            UsageError: a file cannot be read. The message names it.
        """
        # Imported lazily: launchers create this object long before their first call to etcd.
        import grpc  # type: ignore[import-untyped]

        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 500),
            # Connecting times out before the call does, so the call's error shows that nothing was sent.
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
        from flightedl.adapters.etcd_tokens import WithToken

        return grpc.intercept_channel(channel, WithToken(channel, self.user, password, timeout_s))
