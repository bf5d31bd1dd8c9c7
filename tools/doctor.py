"""``flightedl doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from flightedl.adapters.clock import SystemClock
from flightedl.config import DoctorSettings, settings
from flightedl.domain.diagnosis.findings import Finding, Severity, Wait
from flightedl.domain.diagnosis.observations import Observations
from flightedl.domain.diagnosis.trainers import waits
from flightedl.errors import EXIT_FAILED, UsageError
from flightedl.launch.doctor import Doctor

from .options import json_option, running_job_options
from .report import report_of

_MARKS = {Severity.BROKEN: ("broken", "red"), Severity.HARMFUL: ("harmful", "yellow"), Severity.NOTE: ("note", "cyan")}


@click.command()
@running_job_options
@click.option("--checkpoint", metavar="URL", help="Also test this checkpoint store: write, read, delete [none]")
@json_option("Findings and waits as one JSON object.")
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Also write an HTML page."
)
def doctor(as_json: bool, report: Path | None, **options: Any) -> int:
    """Report what is wrong with a job, and what to do about it.

    Queries etcd, the master, all parameter servers and, through the master, the trainers. Shows which process waits for
    which, and why. The exit code is 1 if a problem stops the job.
    """
    values = settings(DoctorSettings, **options)
    own = Doctor(values, SystemClock())
    seen, found = own.explain(own.look(with_stacks=report is not None))
    if as_json:
        click.echo(msgspec.json.encode({"job": seen.job, "findings": found, "waits": waits(seen)}))
    else:
        for line in report_lines(seen, found, waits(seen)):
            click.echo(line)
    if report is not None:
        try:
            report.write_text(report_of(seen, found, waits(seen)), "utf-8")
        except OSError as error:
            raise UsageError(f"cannot write the report to {report}: {error.strerror}") from None
        click.echo(f"flightedl: the report is in {report}", err=True)
    return EXIT_FAILED if any(each.severity is Severity.BROKEN for each in found) else 0


def report_lines(seen: Observations, findings: Sequence[Finding], waiting: Sequence[Wait]) -> list[str]:
    """Return the lines of the result, for people."""
    lines = [f"job {seen.job}: {summary(seen)}"]
    for finding in findings:
        name, color = _MARKS[finding.severity]
        lines += ["", f"{click.style(f'{name:<8}', fg=color, bold=True)} {finding.text} [{finding.cause}]"]
        if finding.advice:
            lines.append(f"         {finding.advice}")
        lines += [f"           {line}" for line in _main_thread(finding.stack)]
    if waiting:
        lines += ["", "who waits for whom:"]
        lines += [f"  {each.who} waits{_seconds(each)} for {each.awaited}" for each in waiting]
    lines += ["", *tried] if (tried := tried_out(seen)) else []
    if not findings:
        lines.append("no problem found")
    return lines


def tried_out(seen: Observations) -> list[str]:
    """Return the results of the probes that this command ran on this machine."""
    lines = []
    if seen.store is not None and not seen.store.error:
        times = ", ".join(f"{what} {seconds * 1e3:.0f} ms" for what, seconds in seen.store.seconds.items())
        lines.append(f"{seen.store.url}: {times} ({seen.store.size_bytes:,} bytes)")
    ends = [each.ends_s for each in seen.certificates.values() if each.ends_s is not None]
    if ends:
        lines.append(
            f"certificates of servers are valid for at least {(min(ends) - seen.asker.wall_s) / 86_400:.0f} days"
        )
    return lines


def summary(seen: Observations) -> str:
    """Return the job's status as one line."""
    status = seen.status
    if status is None:
        return "the master does not answer"
    where = f"epoch {status.epoch + 1}, {status.tasks.done} of {status.tasks.total} tasks done"
    servers = f"{len(status.pservers)} of {status.pservers_desired} pservers"
    return f"{status.state}, {where}, {servers}, {len(status.trainers)} trainers, {status.records_per_s:,.0f} records/s"


def _seconds(wait: Wait) -> str:
    return "" if wait.seconds is None else f" {wait.seconds:.0f} s"


def _main_thread(stack: str) -> list[str]:
    """Return the innermost calls of the main thread."""
    for part in stack.split("\n\n"):
        lines = part.splitlines()
        if lines and lines[0] == "thread MainThread":
            return [line.strip() for line in lines[-5:]]
    return []
