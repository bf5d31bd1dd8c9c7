"""``flightedl jobs``, ``logs``, ``scale`` and ``cancel``: jobs on a Kubernetes cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import click

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.kubectl import Kubectl
from flightedl.config import CommonSettings, require_job_name, settings
from flightedl.errors import NotFoundError, UsageError
from flightedl.launch.kubernetes import submitting
from flightedl.launch.kubernetes.submitting import find
from flightedl.launch.kubernetes.views import has_output, labels_of, view_of
from flightedl.launch.kubernetes.watching import Followers
from flightedl.ports import Cluster

from .consoles import plain_table, table_console
from .options import together

#: ``--namespace`` and ``--context``.
cluster_options = together(
    click.option("--context", default="", help="Context of the kubeconfig [the current one]"),
    click.option("--namespace", "-n", default="", help="Namespace of the job [the context's]"),
)


def cluster_of(given: Mapping[str, Any]) -> Cluster:
    """Return the cluster that the options select."""
    return Kubectl(given["namespace"], given["context"])


@click.command()
@cluster_options
def jobs(**given: Any) -> None:
    """List the jobs of a cluster's namespace."""
    found = [view_of(each) for each in cluster_of(given).list("Job", labels_of("", "trainer"))]
    table = plain_table("job", "state", "trainers", "crashes", "since")
    for view in found:
        table.add_row(view.job, view.state, f"{view.active}/{view.wanted}", str(view.failed), view.created_at)
    if found:
        table_console().print(table)
    else:
        click.echo("this namespace has no jobs")


@click.command()
@click.argument("job")
@click.option(
    "--role",
    type=click.Choice(["trainer", "master", "pserver", "etcd", "autoscaler"]),
    default="trainer",
    help="Part of the job [trainer]",
)
@click.option("--follow", "-f", is_flag=True, help="Continue until the job ends.")
@cluster_options
def logs(job: str, role: str, follow: bool, **given: Any) -> None:
    """Print the output of a job on a cluster."""
    cluster, clock = cluster_of(given), SystemClock()
    find(cluster, job)
    labels = labels_of(job, role)
    if not follow:
        for pod in filter(has_output, cluster.list("Pod", labels)):
            with cluster.logs(pod["metadata"]["name"], follow=False) as lines:
                for line in lines:
                    click.echo(f"{pod['metadata']['name']} | {line}")
        return
    with contextlib.closing(Followers(cluster, lambda name, line: click.echo(f"{name} | {line}"))) as followers:
        while not find(cluster, job).is_finished:
            followers.follow(labels)
            clock.sleep(2.0)
        followers.close(wait_s=2.0)


@click.command()
@click.argument("count", type=click.IntRange(min=0))
@click.option("--job", metavar="NAME", help="Name of the job [FLIGHTEDL_JOB, else the namespace's only job]")
@cluster_options
def trainers(count: int, job: str | None, **given: Any) -> None:
    """Change the number of trainers of a job on a cluster.

    COUNT may be 0: the job then waits until it is scaled up again. Surplus trainers return their tasks.
    """
    if job is not None:
        require_job_name(job)
    cluster = cluster_of(given)
    view = submitting.scale(cluster, job or only_job(cluster), count)
    click.echo(f"job {view.job} is being scaled to {view.wanted} trainers; {view.active} are running")


@click.command()
@click.argument("job")
@click.option("--at-once", is_flag=True, help="Do not wait for the last checkpoint.")
@cluster_options
def cancel(job: str, at_once: bool, **given: Any) -> None:
    """Stop a job on a cluster and remove its objects.

    Its checkpoints remain.
    """
    submitting.cancel(cluster_of(given), job, SystemClock(), at_once=at_once)
    click.echo(f"job {job} is removed")


def only_job(cluster: Cluster) -> str:
    """Return the name of the job in the environment, or of the only running job.

    Raises:
        UsageError: several jobs are running.
        NotFoundError: no job is running.
    """
    named = settings(CommonSettings).job
    if named != CommonSettings().job:
        return named
    found = [view.job for view in map(view_of, cluster.list("Job", labels_of("", "trainer"))) if not view.is_finished]
    if not found:
        raise NotFoundError("no job is running in this namespace")
    if len(found) > 1:
        raise UsageError(f"several jobs are running in this namespace: choose one with --job ({', '.join(found)})")
    return found[0]
