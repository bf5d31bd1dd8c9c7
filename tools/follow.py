"""``flightedl follow`` and ``flightedl serve``: copies of a running job's model."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click
import pyarrow as pa

from flightedl.adapters.clock import SystemClock
from flightedl.client.following.follower import Follower
from flightedl.coordination.checkpoint_places import write_file
from flightedl.errors import UsageError
from flightedl.formats.columns import parameter_batches, parameter_schema

from .options import Number, running_job_options

_WAIT_S = 60.0


@click.command()
@running_job_options
@click.option("--to", "kind", type=click.Choice(["parquet"]), default="parquet", help="Format of the files [parquet]")
@click.option("--every-s", type=Number(min=0.1), default=60.0, show_default=True, help="Seconds between two copies.")
@click.option("--count", type=click.IntRange(min=1), help="Number of copies after which to end [until Ctrl-C]")
@click.argument("url")
def follow(kind: str, every_s: float, count: int | None, url: str, **options: Any) -> None:
    """Keep a copy of a running job's model in files.

    At URL, there is one file for each parameter and each table. Each file is replaced atomically.
    """
    del kind
    clock = SystemClock()
    written = 0
    with Follower(**options).wait(_WAIT_S) as follower:
        while True:
            follower.catch_up(_WAIT_S)
            names = write_copy(follower, url.rstrip("/"))
            written += 1
            click.echo(f"{len(names)} files written to {url}, up to date {follower.age_s:.1f} s ago")
            if written == count:
                return
            clock.sleep(every_s)


def write_copy(follower: Follower, url: str) -> list[str]:
    """Write all parameters and tables as Parquet files; return their URLs."""
    # Imported lazily, because importing Parquet is slow.
    from flightedl.formats.table_files import file_of

    plan, arrays = follower.model().plan, follower.parameters()
    places = []
    for spec in plan.parameters:
        schema = parameter_schema(spec, 0, {"cut": "followed"})
        stored = arrays[spec.name].astype(spec.storage_dtype).reshape(-1)
        batches = parameter_batches(schema, spec, [stored])
        places.append(write_file(f"{url}/{_file_of(spec.name)}", file_of(schema, batches)))
    for name, table in follower.tables.items():
        ids, values = table.rows()
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        batch = pa.RecordBatch.from_arrays([pa.array(ids), column], ["id", "values"])
        places.append(write_file(f"{url}/{_file_of(name)}", file_of(batch.schema, [batch])))
    return places


def _file_of(name: str) -> str:
    return f"{quote(name, safe=' ')}.parquet"


@click.command()
@running_job_options
@click.option("--bind", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Numeric address to listen on.")
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

    if options.get("tls_dir") and bind != "127.0.0.1":
        raise UsageError("requests are not authenticated: omit --bind in a job with TLS")
    clock = SystemClock()
    with Follower(**options).wait(_WAIT_S) as follower:
        service = LookupService(follower)
        identity = ServerIdentity(options.get("job") or "default", "lookup", 0, 1)
        server = FlightServer(service.routes(), identity, clock=clock, host=bind, port=flight_port)
        page = HttpPage("lookup server", bind, port, service.page)
        try:
            server.start_serving(identity)
            click.echo(f"serving http://{bind}:{page.port}/ and grpc://{server.address}")
            end = None if for_s is None else clock.now() + for_s
            while end is None or clock.now() < end:
                clock.sleep(0.2)
        except KeyboardInterrupt:
            return
        finally:
            page.close()
            server.stop(1.0)
