"""The Prometheus page over TLS, which only members can read."""

from __future__ import annotations

import contextlib
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from flightedl.adapters.certificates import Member, create
from flightedl.process.http_page import HttpPage
from flightedl.process.metrics_page import Figure, Metrics
from flightedl.rpc.authentication import Role, pem_files_of


@pytest.fixture
def places(tmp_path: Path) -> Path:
    create(
        tmp_path, [Member("server", "", ("localhost",)), Member("reader", "", ("reader",))], days=2, authority_days=3
    )
    return tmp_path


@pytest.fixture
def port(places: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = int(listener.getsockname()[1])
    metrics = Metrics({"job": "demo"}, lambda: {"x": Figure("X.", 1.0)})
    tls = pem_files_of(str(places), Role.SERVER)
    with contextlib.closing(HttpPage("page", "127.0.0.1", free, metrics.page, tls)):
        yield free


def read(port: int, places: Path, *, is_member: bool) -> str:
    trust = ssl.create_default_context(cafile=str(places / "reader" / "ca.pem"))
    if is_member:
        trust.load_cert_chain(places / "reader" / "cert.pem", places / "reader" / "key.pem")
    with urllib.request.urlopen(f"https://localhost:{port}/metrics", timeout=5, context=trust) as reply:
        return str(reply.read().decode())


def test_members_can_read_the_page(port: int, places: Path) -> None:
    assert 'flightedl_x{job="demo"} 1.0' in read(port, places, is_member=True)


def test_strangers_cannot_read_the_page(port: int, places: Path) -> None:
    with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
        read(port, places, is_member=False)
    with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
