"""Tokens of etcd's users: one is requested when there is none, and a rejected one is not used again."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from flightedl.adapters.etcd_tokens import WithToken


class RejectedError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAUTHENTICATED

    def details(self) -> str:
        return "etcdserver: invalid auth token"


@pytest.mark.parametrize("rejected", [set(), {"token-1"}, {"token-1", "token-2"}])
def test_a_rejected_token_is_replaced_once(rejected: set[str]) -> None:
    made: Any = object.__new__(WithToken)
    made._request, made._timeout_s, made._token, made._lock = None, 1.0, "", threading.Lock()
    logins: list[str] = []

    def log_in(*_: object, **__: object) -> SimpleNamespace:
        logins.append(f"token-{len(logins) + 1}")
        return SimpleNamespace(token=logins[-1])

    used: list[str] = []

    def call(details: Any, _request: object) -> SimpleNamespace:
        used.append(dict(details.metadata)["token"])
        return SimpleNamespace(exception=lambda: RejectedError() if used[-1] in rejected else None)

    made._login = SimpleNamespace(Authenticate=log_in)
    details = SimpleNamespace(method="/put", timeout=1.0, metadata=None, credentials=None)
    for _ in range(2):
        made.intercept_unary_unary(call, details, None)
    expected = {
        0: ["token-1", "token-1"],
        1: ["token-1", "token-2", "token-2"],
        2: ["token-1", "token-2", "token-2", "token-3"],
    }
    assert used == expected[len(rejected)]
    assert logins == sorted(set(used))
