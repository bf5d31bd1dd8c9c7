"""``flightedl certs``: creation and renewal of certificates, and rejected requests."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from flightedl.rpc.authentication import Credentials, Role, proven_role
from flightedl_tools.main import run_command_line

FILES = ("ca.pem", "cert.pem", "key.pem")


def certificate(place: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((place / "cert.pem").read_bytes())


def names(place: Path) -> list[str]:
    found = certificate(place).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in found]


def authorities(place: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates((place / "ca.pem").read_bytes())


def is_trusted(member: Path, by: Path) -> bool:
    """True if a certificate is signed by an authority that another member trusts."""
    for authority in authorities(by):
        try:
            certificate(member).verify_directly_issued_by(authority)
        except (ValueError, TypeError, Exception):  # noqa: BLE001 - what it raises is not documented
            continue
        return True
    return False


@pytest.fixture
def made(tmp_path: Path) -> Path:
    assert run_command_line(["certs", "create", str(tmp_path / "c"), "--job", "demo", "--host", "etcd.example"]) == 0
    return tmp_path / "c"


@pytest.mark.parametrize("role", list(Role))
def test_each_role_gets_a_certificate_that_proves_it(made: Path, role: Role) -> None:
    assert Credentials.load(str(made), role) is not None
    first = names(made / role)[0]
    assert proven_role(first.encode(), "demo") is role
    assert ("flightedl" in names(made / role)) == (role is Role.SERVER)
    assert is_trusted(made / role, made / "server")
    assert not (made / role / "authority").exists()


def test_only_the_owner_can_read_keys(made: Path) -> None:
    for key in made.glob("*/key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_etcd_gets_a_certificate_for_its_names(made: Path) -> None:
    assert names(made / "etcd") == ["localhost", "127.0.0.1", "::1", "etcd.example"]
    ssl.create_default_context(cafile=str(made / "etcd" / "ca.pem"))


def test_certificates_without_a_job_are_valid_for_all_jobs(tmp_path: Path) -> None:
    assert run_command_line(["certs", "create", str(tmp_path / "c")]) == 0
    assert proven_role(names(tmp_path / "c" / "reader")[0].encode(), "whatever") is Role.READER


def test_renewal_makes_new_keys_with_the_same_authority(made: Path) -> None:
    before = {path: path.read_bytes() for path in made.glob("*/key.pem") if path.parent.name != "authority"}
    old = certificate(made / "trainer")
    assert run_command_line(["certs", "renew", str(made), "--days", "200"]) == 0
    assert all(path.read_bytes() != key for path, key in before.items())
    assert certificate(made / "trainer").not_valid_after_utc > old.not_valid_after_utc
    assert names(made / "etcd") == ["localhost", "127.0.0.1", "::1", "etcd.example"]
    assert len(authorities(made / "trainer")) == 1


def test_an_authority_is_replaced_in_two_steps_without_a_gap(made: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    for role in Role:
        (first / role).mkdir(parents=True)
        for name in FILES:
            (first / role / name).write_bytes((made / role / name).read_bytes())
    assert run_command_line(["certs", "renew", str(made), "--authority"]) == 0
    assert is_trusted(first / "trainer", made / "server"), "members that were not restarted are still trusted"
    assert is_trusted(made / "trainer", first / "server"), "members that were not restarted trust restarted ones"
    second = tmp_path / "second"
    second.mkdir()
    (second / "ca.pem").write_bytes((made / "server" / "ca.pem").read_bytes())
    assert run_command_line(["certs", "renew", str(made)]) == 0
    assert is_trusted(made / "trainer", second)
    assert not is_trusted(made / "trainer", first / "server")
    assert is_trusted(first / "trainer", made / "server")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["create", "DIR"], "has an authority already: renew its certificates with `flightedl certs renew`"),
        (["create", "OTHER", "--job", "a/b"], "job name 'a/b' is not usable"),
        (["renew", "OTHER"], "has no certificates made by `flightedl certs create`"),
        (["renew", "DIR", "--days", "9000"], "the authority expires on"),
    ],
)
def test_impossible_requests_raise_one_sentence(
    made: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    places = {"DIR": str(made), "OTHER": str(made.parent / "other")}
    assert run_command_line(["certs", *(places.get(word, word) for word in arguments)]) == 2
    assert text in capsys.readouterr().err
