"""``flightedl follow`` and ``flightedl serve``: copies of a running job's model."""

from __future__ import annotations

from typing import Any

import click

from flightedl.adapters.clock import SystemClock
from flightedl.client.following.consumer import checked_name
from flightedl.client.following.follower import Follower
from flightedl.config import LOOPBACK, CommonSettings, host_port, is_loopback, settings
from flightedl.errors import UsageError

from .options import Number, running_job_options

_WAIT_S = 60.0


_wire_option = click.option(
    "--wire",
    type=click.Choice(["bfloat16", "float16"]),
    help="Receive float32 values rounded to this type, which halves the traffic [no rounding]",
)


_name_option = click.option(
    "--name",
    metavar="NAME",
    callback=lambda _context, _parameter, text: None if text is None else checked_name(text),
    help="Name of this copy in `flightedl status` [no name]",
)


@click.command()
@running_job_options
@_name_option
@_wire_option
@click.option("--to", "kind", type=click.Choice(["parquet"]), default="parquet", help="Format of the files [parquet]")
@click.option("--every-s", type=Number(min=0.1), default=60.0, show_default=True, help="Seconds between two copies.")
@click.option("--count", type=click.IntRange(min=1), help="Number of copies after which to end [until Ctrl-C]")
@click.option(
    "--increments", type=click.IntRange(min=0), default=20, show_default=True, help="Maximum increments after a base."
)
@click.argument("url")
def follow(kind: str, every_s: float, count: int | None, increments: int, url: str, **options: Any) -> None:
    """Keep a copy of a running job's model in files.

    At URL, there is one file for each parameter, and one directory for each table. After a table's first file, further
    files have only the rows that have changed. If URL has a copy already, it is continued.
    """
    # Imported lazily, because importing Parquet is slow.
    from flightedl.client.following.files import ParquetCopy, Rows

    del kind
    clock = SystemClock()
    copy = ParquetCopy(url, settings(CommonSettings, job=options.get("job")).job, increments)
    end = None if count is None else copy.written.number + count
    with Follower(**options).wait(_WAIT_S) as follower:
        while True:
            follower.catch_up(_WAIT_S)
            model, age_s = follower.model(), follower.age_s
            positions = model.positions()
            rows = {name: Rows.of(*table.rows()) for name, table in follower.tables.items()}
            copy.write(model.plan.parameters, model.arrays(), rows, positions, clock.wall_time() - age_s)
            click.echo(f"copy {copy.written.number} written to {url}, up to date {age_s:.1f} s ago")
            if copy.written.number == end:
                return
            clock.sleep(every_s)


@click.command()
@running_job_options
@_name_option
@_wire_option
@click.option("--bind", metavar="ADDRESS", default=LOOPBACK, show_default=True, help="Numeric address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of HTTP; 0 chooses a free one [0]")
@click.option(
    "--flight-port", type=click.IntRange(0, 65535), default=0, help="Port of Flight; 0 chooses a free one [0]"
)
@click.option("--for-s", type=Number(min=0), help="Seconds after which to end [until Ctrl-C]")
def serve(bind: str, port: int, flight_port: int, for_s: float | None, **options: Any) -> None:
    """Serve lookups in a copy of a running job's model.

    Clients use HTTP with JSON, or Arrow Flight. Use it only for demonstrations and small services on one machine,
    because requests are not authenticated.
    """
    from flightedl.client.following.serving import LookupService
    from flightedl.process.http_page import HttpPage
    from flightedl.rpc.identity import ServerIdentity
    from flightedl.rpc.server import FlightServer

    if options.get("tls_dir") and not is_loopback(bind):
        raise UsageError("requests are not authenticated: omit --bind in a job with TLS")
    clock = SystemClock()
    with Follower(**options).wait(_WAIT_S) as follower:
        service = LookupService(follower)
        identity = ServerIdentity(options.get("job") or "default", "lookup", 0, 1)
        server = FlightServer(service.routes(), identity, clock=clock, host=bind, port=flight_port)
        page = HttpPage("lookup server", bind, port, service.page)
        try:
            server.start_serving(identity)
            click.echo(f"serving http://{host_port(bind, page.port)}/ and grpc://{server.address}")
            end = None if for_s is None else clock.now() + for_s
            while end is None or clock.now() < end:
                clock.sleep(0.2)
        except KeyboardInterrupt:
            return
        finally:
            page.close()
            server.stop(1.0)
