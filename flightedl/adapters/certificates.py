"""A private certificate authority for a job, implemented with the ``cryptography`` library.

A directory of certificates contains files for the authority and for each role:

* ``ca.pem`` contains the certificates of the authorities that members trust, newest first. ``authority/key.pem`` is the
  private key of the newest authority, which signs members' certificates. Only this module reads the key; keep it off
  the job's hosts.
* ``ROLE/ca.pem``, ``ROLE/cert.pem`` and ``ROLE/key.pem`` are the files needed by processes with that role.

Renewal replaces one file after the other. A process that reads the files during the renewal may find a key that does
not match the certificate. It then keeps using the previous files, and reads the files again at its next connection.

An authority is replaced in two steps, so that no process is presented with a certificate that it does not trust.
``renew_authority`` adds a new authority to the trusted ones. Once all processes trust it, ``renew`` issues certificates
that it has signed, and removes expired authorities.

Keys are elliptic-curve keys (P-256), which all TLS libraries support. Key files are readable only by their owner.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flightedl.errors import UsageError

_AUTHORITY = "authority"
_BACKDATED = dt.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Member:
    """Owner of a certificate.

    Attributes:
        name: Name of the member's directory, and its common name.
        proof: URI that is the first alternative name.
        hosts: Further alternative names: host names and IP addresses.
    """

    name: str
    proof: str
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Expiry of a new certificate."""

    name: str
    path: Path
    ends: dt.datetime


def create(directory: Path, members: Sequence[Member], *, days: int, authority_days: int) -> list[Lifetime]:
    """Create an authority, and a certificate for each member.

    Args:
        directory: Directory of the certificates. Created if it does not exist.
        members: Owners of the certificates.
        days: Validity of the certificates, in days.
        authority_days: Validity of the authority, in days.

    Raises:
        UsageError: an authority already exists, or the directory is not writable.
    """
    if (directory / "ca.pem").exists():
        raise UsageError(f"{directory} has an authority already: renew its certificates with `flightedl certs renew`")
    _new_authority(directory, authority_days, trusted=())
    return renew(directory, members, days=days)


def renew_authority(directory: Path, members: Sequence[Member], *, authority_days: int) -> None:
    """Create another trusted authority. After that, ``renew`` issues certificates that it has signed.

    Raises:
        UsageError: there is no authority.
    """
    trusted = _trusted(directory)
    _new_authority(directory, authority_days, trusted=trusted)
    for member in members:
        _write(directory / member.name / "ca.pem", (directory / "ca.pem").read_bytes())


def _new_authority(directory: Path, days: int, trusted: Iterable[x509.Certificate]) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"flightedl authority {x509.random_serial_number():x}")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key, *_span(days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(directory / _AUTHORITY / "key.pem", _pem_of_key(key), is_secret=True)
    _write(directory / "ca.pem", _pem([certificate, *trusted]))


def renew(directory: Path, members: Sequence[Member], *, days: int) -> list[Lifetime]:
    """Issue new certificates and keys, signed by the newest authority. Running processes keep their old ones.

    Raises:
        UsageError: there is no authority, or it would expire before the certificates.
    """
    trusted = _trusted(directory)
    authority, now = trusted[0], dt.datetime.now(dt.UTC)
    try:
        loaded = serialization.load_pem_private_key((directory / _AUTHORITY / "key.pem").read_bytes(), None)
    except (OSError, ValueError):
        raise UsageError(f"{directory / _AUTHORITY / 'key.pem'} cannot be read: it signs the certificates") from None
    assert isinstance(loaded, ec.EllipticCurvePrivateKey), "the authority's key is an elliptic one"
    begins, ends = _span(days)
    if ends > authority.not_valid_after_utc:
        raise UsageError(
            f"the authority expires on {authority.not_valid_after_utc:%Y-%m-%d}, before certificates of {days} days: "
            "renew it first with `flightedl certs renew --authority`, or shorten their validity with --days"
        )
    still_good = _pem(each for each in trusted if each.not_valid_after_utc > now)
    _write(directory / "ca.pem", still_good)
    made = []
    for member in members:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(member, key, authority, loaded, begins, ends)
        place = directory / member.name
        _write(place / "ca.pem", still_good)
        _write(place / "key.pem", _pem_of_key(key), is_secret=True)
        _write(place / "cert.pem", _pem([certificate]))
        made.append(Lifetime(member.name, place, ends))
    return made


def _certificate(
    member: Member,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    begins: dt.datetime,
    ends: dt.datetime,
) -> x509.Certificate:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(member.proof)] if member.proof else []
    for host in member.hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"flightedl-{member.name}")])
    return (
        _builder(name, authority.subject, key, begins, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _builder(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begins: dt.datetime, ends: dt.datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(begins).not_valid_after(ends)


def _span(days: int) -> tuple[dt.datetime, dt.datetime]:
    """Return the start and end of a certificate's validity. The start is in the past, because clocks differ."""
    now = dt.datetime.now(dt.UTC)
    return now - _BACKDATED, now + dt.timedelta(days=days)


def _trusted(directory: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates((directory / "ca.pem").read_bytes())
    except (OSError, ValueError):
        raise UsageError(
            f"{directory} has no authority: create one, with certificates, by `flightedl certs create`"
        ) from None


def _pem(certificates: Iterable[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, *, is_secret: bool = False) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        number, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(number, "wb") as file:
            os.fchmod(number, 0o600 if is_secret else 0o644)
            file.write(data)
        Path(name).replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
