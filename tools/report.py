"""A report on a job's status and problems, as one HTML file that can be shared.

The page loads no external resources. Passwords in URLs are removed; error messages of scripts are included unchanged.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Sequence
from html import escape

from flightedl.domain.diagnosis.findings import Finding, Wait
from flightedl.domain.diagnosis.observations import Observations
from flightedl.domain.diagnosis.trainers import name_of
from flightedl.recording.texts import url_without

_URL = re.compile(r"\w+://[^\s'\",]+")

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--broken:#c33;--harmful:#b70;--note:#37a}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;width:100%;display:block;overflow-x:auto}
th,td{text-align:left;padding:.25rem .75rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
article{border-left:.3rem solid var(--note);padding:.1rem 1rem;margin:1rem 0}
article.broken{border-color:var(--broken)}article.harmful{border-color:var(--harmful)}
pre{overflow-x:auto;font-size:.85rem}
"""


def report_of(seen: Observations, findings: Sequence[Finding], waiting: Sequence[Wait]) -> str:
    """Return the page."""
    at = dt.datetime.fromtimestamp(seen.asker.wall_s, dt.UTC)
    parts = [
        f"<h1>Job {_text(seen.job)}</h1>",
        f"<p>Seen on {at:%Y-%m-%d at %H:%M:%S} by flightedl {_text(seen.asker.version)}. All times are UTC.</p>",
        "<h2>Findings</h2>",
        *(_finding(each) for each in findings),
        "" if findings else "<p>No problem found.</p>",
        "<h2>Who waits for whom</h2>",
        _table(
            ("who", "for whom", "seconds"),
            ((each.who, each.awaited, "" if each.seconds is None else f"{each.seconds:.0f}") for each in waiting),
        ),
        "<h2>Processes</h2>",
        _table(("process", "where", "state", "details"), _processes(seen)),
        "<h2>Probes</h2>",
        _table(("what", "result"), _tried(seen)),
        "<h2>Events</h2>",
        _table(("when", "kind", "what"), _events(seen)),
        "<h2>Thread stacks</h2>" if seen.stacks else "",
        *(
            f"<details><summary>{_text(who)}</summary><pre>{_text(text)}</pre></details>"
            for who, text in sorted(seen.stacks.items())
        ),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(seen.job)}</title>'
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'


def _text(text: object) -> str:
    return escape(_URL.sub(lambda found: url_without(found[0]), str(text)))


def _finding(found: Finding) -> str:
    stack = f"<pre>{_text(found.stack)}</pre>" if found.stack else ""
    kind = found.severity.name.lower()
    text = f"<p><strong>{kind}: {_text(found.text)} [{found.cause}]</strong></p><p>{_text(found.advice)}</p>"
    return f'<article class="{kind}">{text}{stack}</article>'


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else "<p>Nothing.</p>"


def _processes(seen: Observations) -> Iterable[tuple[str, str, str, str]]:
    for member in seen.etcd:
        answered = "does not answer" if member.seconds is None else f"answers in {member.seconds * 1e3:.0f} ms"
        yield "etcd", member.address, answered, member.error
    if seen.master is not None:
        state = "serving" if seen.status is not None else "does not answer"
        yield "master", seen.master.address, state, seen.master.error
    for index, asked in sorted(seen.pservers.items()):
        reply = seen.replies.get(index)
        if reply is None:
            yield seen.pserver(index), asked.address, "does not answer", asked.error
        else:
            versions = f"versions {reply.lowest_version} to {reply.highest_version}"
            size = f"{reply.blocks} blocks, {reply.size_bytes / 1e6:,.1f} MB"
            yield seen.pserver(index), asked.address, reply.state, f"{size}, {versions}"
    for trainer in () if seen.status is None else seen.status.trainers:
        state = f"waits for {trainer.waiting_for}" if trainer.waiting_for else f"holds {trainer.holding} tasks"
        heard = f"heard {trainer.silent_s:.0f} s ago, {trainer.records:,} records"
        yield name_of(trainer), f"{trainer.host} pid {trainer.pid}", state, heard


def _tried(seen: Observations) -> Iterable[tuple[str, str]]:
    if seen.store is not None:
        times = ", ".join(f"{what} {seconds * 1e3:.0f} ms" for what, seconds in seen.store.seconds.items())
        yield seen.store.url, seen.store.error or f"{times} ({seen.store.size_bytes:,} bytes)"
    for path, (free, total) in sorted(seen.disks.items()):
        yield f"disk of {path}", f"{free / 1e9:,.1f} of {total / 1e9:,.1f} GB free"
    for who, shown in sorted(seen.certificates.items()):
        if shown.ends_s is not None:
            yield f"certificate of {who}", f"until {dt.datetime.fromtimestamp(shown.ends_s, dt.UTC):%Y-%m-%d %H:%M}"


def _events(seen: Observations) -> Iterable[tuple[str, str, str]]:
    for event in reversed(seen.events):
        yield f"{dt.datetime.fromtimestamp(event.at, dt.UTC):%m-%d %H:%M:%S}", event.kind, event.text
