"""``flightedl certs``: certificates that authenticate the members of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from flightedl.config import require_job_name
from flightedl.errors import UsageError
from flightedl.launch.certificates import members
from flightedl.messages.decoding import from_json
from flightedl.rpc.authentication import ANY_JOB

if TYPE_CHECKING:
    from flightedl.adapters import certificates

_PLAN = "members.json"


class _Plan(msgspec.Struct, frozen=True):
    """Settings of the certificates in a directory, which are stored for renewal."""

    job: str
    hosts: list[str]
    days: int


@click.group()
def certs() -> None:
    """Create and renew the certificates of a job.

    A private authority issues one certificate per role.

    Roles: server (masters and pservers), trainer, reader (status and the model), admin (checkpoints, mode, failed
    tasks), and etcd (for your own etcd). Set FLIGHTEDL_TLS_DIR of each process to the directory of its role. Do not
    copy DIR/authority to the machines of the job.
    """


@certs.command()
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--job", metavar="NAME", help="The only job for which they are valid [all jobs]")
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="Name or address of etcd; may be repeated")
@click.option("--days", type=click.IntRange(min=1), default=90, show_default=True, help="Days of validity")
@click.option(
    "--authority-days", type=click.IntRange(min=1), default=3650, show_default=True, help="Validity of the authority"
)
def create(directory: Path, job: str | None, hosts: tuple[str, ...], days: int, authority_days: int) -> None:
    """Create an authority and the certificates of all roles in DIR."""
    from flightedl.adapters import certificates

    if job is not None:
        require_job_name(job)
    plan = _Plan(job or ANY_JOB, list(hosts), days)
    made = certificates.create(directory, members(plan.job, plan.hosts), days=days, authority_days=authority_days)
    (directory / _PLAN).write_bytes(msgspec.json.encode(plan))
    _print_lifetimes(made)


@certs.command()
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--days", type=click.IntRange(min=1), help="Days of validity [as before]")
@click.option("--authority", is_flag=True, help="Only add a new trusted authority; renew again to use it")
@click.option(
    "--authority-days", type=click.IntRange(min=1), default=3650, show_default=True, help="Validity of the authority"
)
def renew(directory: Path, days: int | None, authority: bool, authority_days: int) -> None:
    """Renew the certificates of all roles in DIR.

    A running job continues. Trainers and commands read the new certificates when they next connect. Restart the masters
    and pservers one after another, so that they load theirs.
    """
    from flightedl.adapters import certificates

    try:
        plan = from_json((directory / _PLAN).read_bytes(), _Plan)
    except (OSError, msgspec.MsgspecError):
        raise UsageError(f"{directory} has no certificates made by `flightedl certs create`") from None
    if authority:
        certificates.renew_authority(directory, members(plan.job, plan.hosts), authority_days=authority_days)
        click.echo(
            f"{directory}/ca.pem now also contains a new authority. When all processes have been restarted with this "
            f"file, issue certificates with the new authority: flightedl certs renew {directory}"
        )
        return
    _print_lifetimes(certificates.renew(directory, members(plan.job, plan.hosts), days=days or plan.days))


def _print_lifetimes(made: list[certificates.Lifetime]) -> None:
    for each in made:
        click.echo(f"{each.path}  until {each.ends:%Y-%m-%d}")
