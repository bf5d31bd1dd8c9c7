"""Wrong settings raise one sentence, for arguments as for environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flightedl.config import (
    CommonSettings,
    MasterSettings,
    PserverSettings,
    Resume,
    TrainerSettings,
    available_cores,
    child_environment,
    host_port,
    settings,
    thread_environment,
    to_environment,
)
from flightedl.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"job": "a/b"}, "job name 'a/b' is not usable: use 1-63 lower-case letters"),
        ({"job": 5}, "job is 5, but must be text"),
        ({"etcd": "nowhere"}, "etcd address 'nowhere' is not host:port"),
        ({"etcd": "::1:2379"}, "etcd address '::1:2379' is not host:port, with an IPv6 address in brackets"),
        ({"etcd": "http://u:secret@a:2379"}, "etcd address '…@a:2379' is not host:port, without user and password"),
        ({"etcd": "ftp://a:2379"}, "etcd address 'ftp://a:2379' is not host:port"),
        ({"etcd": "a:1,https://b:2379"}, "etcd address 'https://b:2379' contradicts FLIGHTEDL_ETCD_TLS_DIR: set the"),
        ({"etcd": "http://b:1", "etcd_tls_dir": "c"}, "contradicts FLIGHTEDL_ETCD_TLS_DIR: omit it, or write https://"),
        ({"log_level": "LOUD"}, "log_level is 'LOUD', but must be one of DEBUG, INFO"),
        ({"lease_ttl_s": float("nan")}, "lease_ttl_s is nan, but must be a number"),
        ({"lease_ttl_s": "5"}, "lease_ttl_s is '5', but must be a number"),
        ({"pservers": 2.0}, "pservers is 2.0, but must be a whole number"),
        ({"pservers": True}, "pservers is True, but must be a whole number"),
        ({"resume": "yes"}, "resume is 'yes', but must be true, false or auto"),
        ({"bind": "0.0.0.0"}, "bind is 0.0.0.0, and without TLS anyone who can reach it has full access: create"),
        ({"bind": "10.0.0.1"}, "set insecure (--insecure or FLIGHTEDL_INSECURE=true)"),
        ({"etcd_user": "me"}, "etcd_user and etcd_password_file belong together"),
        ({"etcd_user": "me", "etcd_password_file": "f"}, "a password is only sent to etcd over TLS"),
    ],
)
def test_a_wrong_argument_raises_one_sentence(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(MasterSettings, {}, **arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tls_dir", "addresses"),
    [
        ("a:1, b:2", "", "a:1,b:2"),
        ("http://127.0.0.1:2379/", "", "127.0.0.1:2379"),
        ("http://[::1]:2379,b:2", "", "[::1]:2379,b:2"),
        ("https://a:1,b:2", "certs", "a:1,b:2"),
    ],
)
def test_an_address_of_etcd_may_have_a_scheme(text: str, tls_dir: str, addresses: str) -> None:
    given = {"FLIGHTEDL_ETCD": text, "FLIGHTEDL_ETCD_TLS_DIR": tls_dir}
    assert settings(TrainerSettings, given).etcd == addresses


def test_children_write_utf_8_whatever_the_encoding_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    assert child_environment()["PYTHONIOENCODING"] == "utf-8"


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7"), ("[::1]", "[::1]:7"), ("a.example", "a.example:7")],
)
def test_an_ipv6_address_is_written_in_brackets(host: str, address: str) -> None:
    assert host_port(host, 7) == address


@pytest.mark.parametrize(
    "arguments", [{"bind": "::1"}, {"bind": "0.0.0.0", "insecure": True}, {"bind": "0.0.0.0", "tls_dir": "certs"}]
)
def test_binding_beyond_loopback_requires_tls_or_insecure(arguments: dict[str, Any]) -> None:
    assert settings(MasterSettings, {}, **arguments).bind == arguments["bind"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("LEASE_TTL_S", "soon", "FLIGHTEDL_LEASE_TTL_S is 'soon', but must be a number"),
        ("LEASE_TTL_S", "nan", "FLIGHTEDL_LEASE_TTL_S is 'nan', but must be a number"),
        ("PSERVERS", "2.5", "FLIGHTEDL_PSERVERS is '2.5', but must be a whole number"),
        ("RESUME", "yes", "FLIGHTEDL_RESUME is 'yes', but must be true, false or auto"),
    ],
)
def test_a_wrong_variable_raises_one_sentence(name: str, value: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(MasterSettings, {f"FLIGHTEDL_{name}": value})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, Resume.ALWAYS), ("auto", Resume.AUTO), ("True", Resume.ALWAYS), ("0", Resume.NEVER), (False, Resume.NEVER)],
)
def test_resume_accepts_booleans_and_auto(given: bool | str, expected: Resume) -> None:
    made = settings(MasterSettings, {}, resume=given, checkpoint="/x")
    assert made.resume is expected
    assert settings(MasterSettings, to_environment(made)).resume is expected
    if expected is not Resume.NEVER:
        with pytest.raises(UsageError, match="resume needs the URL"):
            settings(MasterSettings, {}, resume=given)


def test_unambiguous_values_of_another_type_are_accepted() -> None:
    chosen = settings(MasterSettings, {}, lease_ttl_s=3, log_level="info", checkpoint=Path("/data"))
    assert (chosen.lease_ttl_s, chosen.checkpoint) == (3.0, "/data")


def test_processes_share_the_cores_unless_the_user_sets_thread_counts() -> None:
    shared = thread_environment(3, 8, {})
    assert shared["OMP_NUM_THREADS"] == shared["OPENBLAS_NUM_THREADS"] == shared["MKL_NUM_THREADS"] == "2"
    assert set(thread_environment(8, 2, {}).values()) == {"1"}
    assert thread_environment(1, 8, {"OMP_NUM_THREADS": "8"}) == {}


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", None), ("50000 100000", 1), ("9900000 100000", None)])
def test_a_container_quota_limits_the_cores(tmp_path: Path, quota: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    machine = available_cores(tmp_path / "none")
    assert available_cores(tmp_path / "cpu.max") == (machine if cores is None else min(cores, machine))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (CommonSettings, "lease_ttl_s", 0.5),
        *((MasterSettings, name, 65536) for name in ("port", "metrics_port", "health_port")),
        *((MasterSettings, name, -1) for name in ("port", "drain_s", "trainers", "checkpoint_every_s")),
        *((MasterSettings, f"checkpoint_{name}", -1) for name in ("every_tasks", "keep_every", "increments")),
        *((MasterSettings, name, 0) for name in ("attempts_limit", "checkpoint_keep", "task_timeout_factor")),
        *((MasterSettings, name, 0) for name in ("task_timeout_floor_s", "follow_every_s", "stuck_after_s")),
        (MasterSettings, "pservers", -2),
        *((PserverSettings, name, -1) for name in ("table_memory_mb", "leave_s")),
        *((TrainerSettings, name, -1) for name in ("give_up_s", "say_after_s", "metrics_port")),
    ],
)
def test_a_range_is_enforced_for_every_source_of_a_setting(kind: type[CommonSettings], name: str, value: float) -> None:
    variable = f"FLIGHTEDL_{name.upper()}"
    pattern = rf"{name} is {value}, but must be .* \(--{name.replace('_', '-')} or {variable}\)"
    with pytest.raises(UsageError, match=pattern):
        settings(kind, {}, **{name: value})
    with pytest.raises(UsageError, match=pattern):
        settings(kind, {variable: str(value)})
    with pytest.raises(UsageError, match=pattern):
        kind(**{name: value})
