"""Access to a real etcd with users over TLS, by certificate or password, and rejected access."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flightedl.adapters.certificates import Member, create
from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.coordination.keys import JobKeys
from flightedl.errors import AuthenticationError, FlightedlError, UnavailableError, UsageError
from flightedl.ports import Put
from tests.support.etcd_server import EtcdServer

from .etcd_users import enable

pytestmark = pytest.mark.etcd

PASSWORD = "correct horse"
TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates with the common names flightedl-root, flightedl-job-a and so on, and one of another authority."""
    root = tmp_path_factory.mktemp("certificates")
    hosts = ("localhost", "127.0.0.1")
    names = [Member("etcd", "", hosts), Member("job-a", "", ("a",)), Member("job-b", "", ("b",)), Member("nobody", "")]
    create(root, names, days=2, authority_days=3)
    create(root / "stranger", [Member("job-a", "", ("a",))], days=2, authority_days=3)
    (root / "password").write_text(PASSWORD + "\n")
    (root / "wrong-password").write_text("battery staple\n")
    return root


@pytest.fixture
def etcd(places: Path) -> Iterator[EtcdServer]:
    """An etcd with a user for each of two jobs, who can access only that job's keys."""
    with EtcdServer(tls_dir=places / "etcd") as server:
        users = {job: (job, f"flightedl-{job}") for job in ("job-a", "job-b")}
        enable(server, users, PASSWORD)
        yield server


@pytest.fixture
def connect(etcd: EtcdServer, places: Path) -> Iterator[Callable[..., EtcdCoordinator]]:
    made: list[EtcdCoordinator] = []

    def coordinator(who: str, user: str = "", password: str = "") -> EtcdCoordinator:
        access = EtcdAccess(etcd.address, str(places / who), user, str(places / password) if password else "")
        made.append(EtcdCoordinator(access, timeout_s=TIMEOUT_S, clock=SystemClock()))
        return made[-1]

    yield coordinator
    for each in made:
        each.close()


WAYS = {"by its certificate": ("job-a",), "by a password": ("nobody", "job-a", "password")}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_job_has_access_only_to_its_own_keys(connect: Callable[..., EtcdCoordinator], way: str) -> None:
    coordinator = connect(*WAYS[way])
    mine, other = JobKeys("job-a"), JobKeys("job-b")
    lease = coordinator.grant(5.0)
    assert coordinator.transact([], [Put(mine.prefix + "x", b"1", lease.id)]).committed
    lease.renew()
    assert coordinator.get(mine.prefix + "x") is not None
    assert [entry.key for entry in coordinator.list(mine.prefix).entries] == [mine.prefix + "x"]
    watch = coordinator.watch(mine.prefix, 0)
    coordinator.transact([], [Put(mine.state_prefix + "x", b"1"), Put(mine.prefix + "y", b"2")])
    assert watch.next(TIMEOUT_S)
    watch.close()
    for ask in (
        lambda: coordinator.get(other.prefix + "x"),
        lambda: coordinator.list(other.prefix),
        lambda: coordinator.list("/"),
        lambda: coordinator.transact([], [Put(other.prefix + "x", b"1")]),
        lambda: coordinator.transact([], [Put(other.state_prefix + "x", b"1")]),
    ):
        with pytest.raises(AuthenticationError, match="refused access"):
            ask()


def test_a_wrong_password_is_reported_and_not_shown(connect: Callable[..., EtcdCoordinator]) -> None:
    coordinator = connect("nobody", "job-a", "wrong-password")
    with pytest.raises(FlightedlError) as caught:
        coordinator.get(JobKeys("job-a").prefix)
    assert "authentication failed" in str(caught.value)
    assert "staple" not in str(caught.value)


def test_a_token_that_etcd_has_dropped_is_renewed(etcd: EtcdServer, connect: Callable[..., EtcdCoordinator]) -> None:
    coordinator = connect("nobody", "job-a", "password")
    key = JobKeys("job-a").prefix + "x"
    coordinator.transact([], [Put(key, b"1")])
    etcd.restart()
    for _ in range(50):
        try:
            assert coordinator.get(key) is not None
        except UnavailableError:
            continue
        break
    assert coordinator.transact([], [Put(key, b"2")]).committed


def test_strangers_and_plain_text_are_rejected(etcd: EtcdServer, places: Path) -> None:
    own = EtcdAccess(etcd.address, str(places / "job-a"))
    stranger = dataclasses.replace(own, tls_dir=str(places / "stranger" / "job-a"))
    for access in (stranger, dataclasses.replace(own, tls_dir="")):
        coordinator = EtcdCoordinator(access, timeout_s=1.0, clock=SystemClock())
        with pytest.raises(UnavailableError):
            coordinator.get(JobKeys("job-a").prefix)
        coordinator.close()


def test_a_missing_file_is_named(etcd: EtcdServer, tmp_path: Path) -> None:
    coordinator = EtcdCoordinator(EtcdAccess(etcd.address, str(tmp_path)), clock=SystemClock())
    with pytest.raises(UsageError, match=r"ca\.pem cannot be read .*FLIGHTEDL_ETCD_TLS_DIR"):
        coordinator.get("/x")
    coordinator.close()
