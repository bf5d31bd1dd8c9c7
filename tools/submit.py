"""``flightedl submit``: run a whole job on a Kubernetes cluster and wait until it ends."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flightedl.adapters.clock import SystemClock
from flightedl.config import ENVIRONMENT_PREFIX, MasterSettings, PserverSettings, TrainerSettings
from flightedl.errors import UsageError
from flightedl.launch.kubernetes.etcd_members import certificate_hosts
from flightedl.launch.kubernetes.objects import render, require_common_place
from flightedl.launch.kubernetes.secrets import make_secrets, secret_names
from flightedl.launch.kubernetes.submitting import submit as submit_objects
from flightedl.launch.kubernetes.values import CODE, ClusterJob, Resources, Scaling
from flightedl.launch.kubernetes.views import JobView, labels_of
from flightedl.launch.kubernetes.watching import Followers, wait
from flightedl.launch.progress import Display, Figures, make_display
from flightedl.launch.run import job_name
from flightedl.messages.status import StatusReply
from flightedl.ports import Cluster

from .clusters import cluster_of, cluster_options
from .documents import as_yaml
from .options import Number, ScriptCommand, notice_option, resume_option
from .pods import pair_of, pod_options, templates_of
from .run import run

#: Limit on the total size of a ConfigMap's files.
_CODE_LIMIT_BYTES = 900_000
#: Names of the options that are fields of a ``ClusterJob``.
_SAME = (
    *(
        "image",
        "pservers",
        "spares",
        "standby_pservers",
        "masters",
        "checkpoint",
        "etcd",
        "etcd_image",
        "insecure",
        "egress_ports",
        "secret",
        "keep_s",
    ),
    *("queue", "backoff_limit", "deadline_s", "leave_s"),
)
_DEFAULTS: dict[str, Any] = {"trainers": "2", "pservers": 2, "spares": 1}
#: Defaults with ``--nproc-per-node``.
_OF_GROUPS = {"trainers": "1", "pservers": 0, "spares": 0}
_STANDBY_HELP = "Pservers that each copy the blocks of one pserver, and take over without loading a checkpoint [0]"
_IN_EVERY_IMAGE = "flightedl."
_EGRESS_HELP = "Port that pods may reach on any host, in addition to 443 and the ports of URLs in options."
_FILE_NAME = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_COUNT = re.compile(r"(?P<least>[0-9]+)(\.\.(?P<most>[0-9]+))?")


class _SubmitCommand(ScriptCommand):
    """A command that rejects options that only ``flightedl run`` has. Other unknown options go to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        of_run, own = ({name for each in one.params for name in each.opts} for one in (run, self))
        for word in itertools.takewhile(lambda word: word != "--", args):
            name = word.partition("=")[0]
            if name in of_run - own:
                raise UsageError(
                    f"{name} is an option of `flightedl run`, not of `submit`: set its variable (such as --set "
                    "FLIGHTEDL_CHECKPOINT_EVERY_S=10, see docs/settings.md), or put `--` before the script's arguments"
                )
        return super().parse_args(ctx, args)


@click.command(cls=_SubmitCommand, context_settings={"ignore_unknown_options": True})
@click.argument("script_or_module")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@cluster_options
@click.option("--job", metavar="NAME", help="Name of the job [the script's name]")
@click.option("--image", required=True, help="Image of all processes: flightedl's, or one built from it.")
@click.option(
    "--trainers",
    metavar="N | N..M",
    default=_DEFAULTS["trainers"],
    show_default=True,
    help="Number of trainers, or a range N..M for autoscaling.",
)
@click.option("--nproc-per-node", type=click.IntRange(min=1), help="Start N ranks of one group, in one pod.")
@click.option("--worth", type=Number(0, 1), default=0.5, show_default=True, help="With N..M, see `flightedl autoscale`")
@click.option("--pservers", type=int, default=_DEFAULTS["pservers"], show_default=True, help="Number of pservers.")
@click.option(
    "--spares", type=int, default=_DEFAULTS["spares"], show_default=True, help="Spare pservers, ready to take over."
)
@click.option("--standby-pservers", type=int, default=0, help=_STANDBY_HELP)
@click.option("--masters", type=int, default=2, show_default=True, help="One master leads, the others stand by.")
@click.option("--checkpoint", metavar="URL", default="", help="Location of the checkpoints [no checkpoints]")
@resume_option
@click.option("--secret", metavar="NAME", default="", help="Secret with variables, such as AWS_ACCESS_KEY_ID.")
@click.option("--in-image", is_flag=True, help="The script or module is in the image; send nothing.")
@click.option("--with", "files", multiple=True, type=click.Path(path_type=Path), help="Further file to send.")
@click.option("--etcd", metavar="HOST:PORT", default="", help="Use this etcd [start one for the job]")
@click.option("--etcd-members", type=click.Choice(["1", "3", "5"]), default="1", help="Size of the job's own etcd [1]")
@click.option("--etcd-image", default="", metavar="IMAGE", help="Image of the etcd members [for one member: --image]")
@click.option("--egress-port", "egress_ports", multiple=True, type=click.IntRange(1, 65535), help=_EGRESS_HELP)
@click.option("--insecure", is_flag=True, help="No certificates: anyone who can reach the pods has full access.")
@click.option("--server-cpu", default="1", show_default=True, help="CPU request of a server (master or pserver).")
@click.option("--server-memory", default="2Gi", show_default=True, help="Memory request and limit of a server.")
@click.option("--trainer-cpu", default="1", show_default=True, help="CPU request of a trainer.")
@click.option("--trainer-memory", default="4Gi", show_default=True, help="Memory request and limit of a trainer.")
@click.option("--server-cpu-limit", default="", metavar="CPUS", help="CPU limit of a server [none]")
@click.option("--trainer-cpu-limit", default="", metavar="CPUS", help="CPU limit of a trainer [none]")
@click.option("--trainer-gpus", type=click.IntRange(min=0), default=0, help="NVIDIA GPUs per trainer [0]")
@pod_options
@click.option("--queue", metavar="NAME", default="", help="Kueue queue that admits the trainers.")
@click.option("--backoff-limit", type=int, default=6, show_default=True, help="Trainer crashes before the job fails.")
@click.option("--deadline-s", type=int, default=0, help="Seconds after which the job fails; 0 disables this [0]")
@notice_option
@click.option("--leave-s", type=int, default=0, help="Longest time in which an ending pserver moves its blocks [0]")
@click.option("--set", "variables", multiple=True, metavar="NAME=VALUE", help="Environment variable of all processes.")
@click.option("--keep-s", type=int, default=600, show_default=True, help="Seconds to keep a finished job.")
@click.option("--detach", is_flag=True, help="Do not wait for the job's end.")
@click.option("--dry-run", is_flag=True, help="Only print the objects, as YAML.")
def submit(script_or_module: str, arguments: tuple[str, ...], **given: Any) -> int:
    """Run a whole job on a Kubernetes cluster.

    Every trainer runs SCRIPT_OR_MODULE with the ARGUMENTS. Put `--` before arguments that look like options of this
    command. A local script is sent to the cluster; a path or module in the image needs --in-image. Waits until the job
    ends, and shows its progress and the trainers' output. Ctrl-C leaves the job running.

    The exit codes are those of `flightedl run`.
    """
    job = job_of(script_or_module, arguments, given)
    objects = render(job)
    require_common_place(job.checkpoint, objects)
    if given["dry_run"]:
        # The objects have no owner references, because the Job's UID is unknown until it is created.
        click.echo(as_yaml([*objects[1:], objects[0]]), nl=False)
        for line in how_to_make_secrets(job):
            click.echo(f"# {line}")
        return 0
    cluster, clock = cluster_of(given), SystemClock()
    submit_objects(cluster, [*objects, *make_secrets(job)], clock)
    if given["detach"]:
        click.echo(f"job {job.job} is submitted: `flightedl jobs` shows it, `flightedl logs {job.job}` its output")
        return 0
    return watch(cluster, job, make_display(Console(highlight=False), clock))


def how_to_make_secrets(job: ClusterJob) -> list[str]:
    """Return lines that list the Secrets that pods require, and the commands that create these Secrets."""
    names = secret_names(job)
    if not names:
        return []
    hosts = "".join(f" --host {host}" for host in certificate_hosts(job)) if job.own_etcd else ""
    roles = " ".join(name.removeprefix(f"{job.job}-") for name in names)
    return [
        f"Pods wait for the Secrets {', '.join(names)}:",
        f"flightedl certs create certs --job {job.job}{hosts}",
        f"for role in {roles}; do kubectl create secret generic {job.job}-$role --from-file=certs/$role; done",
    ]


def watch(cluster: Cluster, job: ClusterJob, display: Display) -> int:
    """Show a job's progress and output until the job ends. Return the exit code."""
    clock = SystemClock()
    started_at = clock.now()
    trainer_labels = labels_of(job.job, "trainer")
    shown: set[str] = set()

    def show(view: JobView, status: StatusReply | None, obstacles: Sequence[str]) -> None:
        followers.follow(trainer_labels)
        for obstacle in obstacles:
            if obstacle not in shown:
                display.event(obstacle)
        shown.update(obstacles)
        pservers = job.pservers if status is None else status.pservers_desired
        display.update(Figures(clock.now() - started_at, status, view.active, view.wanted, pservers, ""))

    with display, contextlib.closing(Followers(cluster, display.lines)) as followers:
        display.event(f"job {job.job} is submitted; Ctrl-C leaves it running, `flightedl cancel {job.job}` ends it")
        outcome, _status = wait(cluster, job.job, clock, show, keeps_checkpoints=bool(job.checkpoint))
        with contextlib.suppress(Exception):
            followers.follow(trainer_labels)
        followers.close(wait_s=2.0)
    display.event(outcome.reason or f"job {job.job} is done")
    return outcome.exit_code


def job_of(target: str, arguments: Sequence[str], given: dict[str, Any]) -> ClusterJob:
    """Return the job that the command line describes. Raises UsageError if the command line is invalid."""
    if ranks := given["nproc_per_node"] or 0:
        given = given | {name: count for name, count in _OF_GROUPS.items() if given[name] == _DEFAULTS[name]}
    least, most = count_of(given["trainers"])
    code = code_of(target, given["files"], in_image=given["in_image"])
    memory = {role: given[f"{role}_memory"] for role in ("server", "trainer")}
    return ClusterJob(
        job=job_name(target) if given["job"] is None else given["job"],
        target=f"{CODE}/{Path(target).name}" if code else target,
        arguments=tuple(arguments),
        code=code,
        trainers=least,
        ranks=ranks,
        resume=given["resume"] or "",
        etcd_members=int(given["etcd_members"]),
        tls=not given["insecure"],
        scaling=None if most is None else Scaling(least, most, given["worth"]),
        server_resources=Resources(given["server_cpu"], memory["server"], memory["server"], given["server_cpu_limit"]),
        trainer_resources=Resources(
            given["trainer_cpu"],
            memory["trainer"],
            memory["trainer"],
            given["trainer_cpu_limit"],
            given["trainer_gpus"],
        ),
        notice=given["notice"] or "",
        templates=templates_of(given),
        variables=dict(map(variable_of, given["variables"])),
        **{name: given[name] for name in _SAME},
    )


def count_of(text: str) -> tuple[int, int | None]:
    """Parse a number or a range such as ``2..20``. Return the smallest number and, for a range, the largest."""
    match = _COUNT.fullmatch(text)
    if match is None or (match["most"] and int(match["most"]) < int(match["least"])):
        raise UsageError(f"--trainers is {text!r}, but must be a number or a range such as 2..20")
    return int(match["least"]), int(match["most"]) if match["most"] else None


def variable_of(text: str) -> tuple[str, str]:
    """Parse ``NAME=VALUE``. Raises UsageError for anything else, and for unknown settings of flightedl."""
    name, value = pair_of(text)
    if not name.isidentifier():
        raise UsageError(f"{text!r} is not NAME=VALUE")
    kinds = (MasterSettings, PserverSettings, TrainerSettings)
    known = {ENVIRONMENT_PREFIX + each.name.upper() for kind in kinds for each in fields(kind)}
    if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
        raise UsageError(f"--set {name}: unknown setting; docs/settings.md lists all settings")
    return name, value


def code_of(target: str, files: Sequence[Path], *, in_image: bool = False) -> dict[str, str]:
    """Return the contents of the script and the additional files, by name; empty if the script is in the image.

    Raises:
        UsageError: the script does not exist, or a file cannot be sent.
    """
    if in_image or not Path(target).is_file():
        if files:
            raise UsageError(f"--with needs a local script, but {target} is not one")
        if not in_image and not target.startswith(_IN_EVERY_IMAGE):
            raise UsageError(f"no such file: {target}; if the script or module is in the image, add --in-image")
        return {}
    found: dict[str, str] = {}
    for path in (Path(target), *files):
        if not _FILE_NAME.fullmatch(path.name) or path.name in found:
            why = "two files have this name" if path.name in found else "use only letters, digits, dots, dashes and _"
            raise UsageError(f"cannot send {path} under the name {path.name!r}: {why}")
        try:
            found[path.name] = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot send {path}: {error}") from None
    if sum(len(text.encode()) for text in found.values()) > _CODE_LIMIT_BYTES:
        raise UsageError("the script and its files exceed 900 kB together: put them into the image")
    return found
