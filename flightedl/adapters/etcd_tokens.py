"""Tokens that authenticate calls to etcd for users with a password (see ``etcd_access``)."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any

import etcd3.etcdrpc as rpc
import grpc  # type: ignore[import-untyped]

_TOKEN_HEADER = "token"  # noqa: S105 - the name of a header


class _Details(
    collections.namedtuple(  # noqa: PYI024 - gRPC looks these up by name, and types nothing
        "_Details", ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")
    ),
    grpc.ClientCallDetails,  # type: ignore[misc]
):
    """Details of a call for gRPC: metadata and limits."""


class WithToken(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    """Adds a token to each call. Requests a token before the first call, and after etcd has rejected one.

    Args:
        channel: Channel for token requests.
        user: Name of the user.
        password: Password of the user.
        timeout_s: Time limit of each token request.
    """

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
        # A watch has its own connection, and therefore its own token.
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
    """True if etcd rejected the token before doing anything, so that a retry with another token is safe."""
    if not isinstance(error, grpc.RpcError):
        return False
    code, details = error.code(), error.details() or ""
    return (code is grpc.StatusCode.UNAUTHENTICATED and "invalid auth token" in details) or (
        code is grpc.StatusCode.INVALID_ARGUMENT and "revision of auth store is old" in details
    )
