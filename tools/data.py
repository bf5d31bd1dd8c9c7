"""``flightedl data serve``: a master for ranks that another launcher starts."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from typing import Any

import click

from flightedl.launch.forking import fork_server

from .options import text_of, text_options


@click.group()
def data() -> None:
    """Serve data to ranks that torchrun or another launcher starts."""


@data.command()
@click.argument("urls", nargs=-1, required=True)
@click.option("--format", "format_name", default="", help="Format of the files [by their names]")
@text_options()
@click.option("--job", metavar="NAME", default="data", show_default=True, help="Name of the job.")
@click.option("--etcd", metavar="HOST:PORT", help="Use this running etcd [start one on this machine]")
@click.option("--attempts-limit", type=click.IntRange(min=1), help="Failures of a group before a quarantine [5]")
@click.option("--page/--no-page", default=True, help="Serve the job's web page on this machine [page]")
def serve(urls: tuple[str, ...], format_name: str, types: tuple[tuple[str, str], ...], **given: Any) -> int:
    """Serve the data at URLS with an etcd and a master, and print the environment variables that ranks need.

    Keeps serving, however often the group is restarted, until Ctrl-C or SIGTERM.
    """
    with fork_server(0) as forks:
        from flightedl.adapters.storage import FsspecFiles
        from flightedl.formats.dataset_spec import DatasetSpec, absolute_url
        from flightedl.formats.index import build_index
        from flightedl.launch.cluster import LocalCluster

        text = text_of(*(given.pop(name) for name in ("names", "delimiter", "null_values")))
        spec = DatasetSpec(tuple(map(absolute_url, urls)), format_name, types=types, text=text)
        found = build_index(FsspecFiles(), spec)
        click.echo(f"serving {found.record_count:,} records of {len(found.stats)} files")
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        given = {name: value for name, value in given.items() if value is not None}
        cluster = LocalCluster(0, forks=forks, on_event=click.echo, **given)
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.callback(cluster.stop)
            cluster.start()
            if cluster.page_url:
                click.echo(f"the job's web page is at {cluster.page_url}")
            address = shlex.quote(cluster.etcd_address)
            click.echo(f"before torchrun: export FLIGHTEDL_ETCD={address} FLIGHTEDL_JOB={cluster.job}")
            while not stopped.wait(0.5):
                outcome = cluster.outcome()
                if outcome is not None:
                    click.echo(outcome.reason, err=True)
                    return outcome.exit_code
    return 0
