"""Active probes of the doctor: real directories, and real servers with certificates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flightedl.adapters.certificates import Member, create
from flightedl.adapters.clock import SystemClock
from flightedl.domain.diagnosis.examine import examine
from flightedl.domain.diagnosis.findings import Cause, Finding, Severity
from flightedl.domain.diagnosis.observations import Observations, ShownCertificate, StoreTried
from flightedl.launch.probes import certificate_of, disk_of, try_store
from flightedl.process.host import host_facts
from flightedl.rpc import FlightServer, ServerIdentity
from flightedl.rpc.authentication import SERVER_NAME, Credentials, Role, name_in_certificate
from flightedl.rpc.routes import Routes
from flightedl_tools.doctor import tried_out
from flightedl_tools.report import report_of

CLOCK = SystemClock()
HERE = Observations(job="demo", asker=host_facts())


def found(**seen: object) -> list[Finding]:
    of_job = {Cause.UNKNOWN_JOB, Cause.PSERVER_MISSING}
    return [each for each in examine(replace(HERE, **seen)) if each.cause not in of_job]  # type: ignore[arg-type]


def test_a_storage_is_tested_and_left_unchanged(tmp_path: Path) -> None:
    tried = try_store(str(tmp_path), "demo", CLOCK)
    assert tried.seconds.keys() == {"write", "read", "delete"}
    assert tried.error == ""
    assert tried.free_bytes is not None
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []
    assert found(store=tried) == []
    (line,) = tried_out(replace(HERE, store=tried))
    assert "write" in line
    assert "65,536 bytes" in report_of(replace(HERE, store=tried), [], [])


def test_a_storage_error_is_reported_without_credentials() -> None:
    (refused,) = found(store=try_store("/proc/checkpoints", "demo", CLOCK))
    assert refused.cause is Cause.STORE_FAILS
    assert "/proc/checkpoints" in refused.text
    (other,) = found(store=try_store("nowhere://user:secret@host/place", "demo", CLOCK))
    assert "secret" not in other.text


def test_full_and_slow_storages_and_disks_are_reported() -> None:
    full = StoreTried(url="s3://b", size_bytes=1, error="[Errno 28] No space left on device")
    assert [each.cause for each in found(store=full)] == [Cause.STORE_FULL]
    slow = StoreTried(url="s3://b", size_bytes=1, seconds={"write": 4.0, "read": 0.1, "delete": 0.1})
    (finding,) = found(store=slow)
    assert finding.cause is Cause.STORE_SLOW
    assert "4.0 s to write" in finding.text
    (disk,) = found(disks={"/home": (1_000_000, 100 << 30)})
    assert disk.cause is Cause.DISK_NEARLY_FULL
    assert found(disks={"/home": (50 << 30, 100 << 30)}) == []
    assert disk_of(Path("/nowhere/at/all")) == disk_of(Path("/"))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two authorities, which expire in two days."""
    root = tmp_path_factory.mktemp("certificates")
    members = [
        Member(str(role), name_in_certificate("demo", role), (SERVER_NAME,) if role is Role.SERVER else ())
        for role in (Role.SERVER, Role.ADMIN)
    ]
    for authority in ("right", "other"):
        create(root / authority, members, days=2, authority_days=3)
    return root


@pytest.fixture
def address(places: Path) -> Iterator[str]:
    credentials = Credentials.load(str(places / "right"), Role.SERVER)
    server = FlightServer(Routes(), ServerIdentity("demo", "pserver"), clock=CLOCK, credentials=credentials)
    yield server.address
    server.stop(0.5)


def test_expiring_certificates_are_reported(address: str, places: Path) -> None:
    shown = certificate_of(address, places / "right" / "admin", SERVER_NAME)
    assert shown.ends_s == pytest.approx(CLOCK.wall_time() + 2 * 86_400, abs=600)
    (finding,) = found(certificates={"pserver-0": shown})
    assert (finding.cause, finding.severity) == (Cause.CERTIFICATE_ENDS, Severity.HARMFUL)
    assert "expires in 2.0 days" in finding.text
    assert found(certificates={"pserver-0": ShownCertificate(ends_s=CLOCK.wall_time() + 90 * 86_400)}) == []
    assert "at least" in tried_out(replace(HERE, certificates={"pserver-0": shown}))[0]


def test_a_rejected_certificate_is_reported(address: str, places: Path) -> None:
    shown = certificate_of(address, places / "other" / "admin", SERVER_NAME)
    (finding,) = found(certificates={"master": shown})
    assert finding.severity is Severity.BROKEN
    assert "this machine rejects the certificate" in finding.text
    assert certificate_of("127.0.0.1:1", places / "other" / "admin", SERVER_NAME) == ShownCertificate()
