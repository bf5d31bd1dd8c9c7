"""Drawings of the architecture and of the journeys of a gradient, a task and a row.

``make pictures`` writes them. A journey is a sequence diagram. Colors are those of the site's theme, which may be dark
or light. In a page that does not define them, they follow the reader's preference.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
_WIDTH, _TOP, _LINE = 900, 76, 17
_STYLE = """
.drawing { --ink: #1b1f24; --soft: #6a7280; --card: #ffffff; --fill: #eef3fb; --line: #2757dd; --bad: #c62828; }
@media (prefers-color-scheme: dark) {
  .drawing { --ink: #e8eaed; --soft: #9aa3b0; --card: #131416; --fill: #1d2533; --line: #7ba3ff; --bad: #ff8a80; }
}
.drawing { --ink2: var(--color-foreground-primary, var(--ink)); --card2: var(--color-background-primary, var(--card));
  --line2: var(--color-brand-content, var(--line)); --fill2: var(--color-background-secondary, var(--fill)); }
.drawing text { font: 13px system-ui, sans-serif; fill: var(--ink2); text-anchor: middle; }
.drawing .title { font-weight: 600; }
.drawing .number { font-size: 11px; fill: var(--card2); }
.drawing .over { paint-order: stroke; stroke: var(--card2); stroke-width: 5px; stroke-linejoin: round; }
.drawing .card { fill: var(--card2); }
.drawing .box { fill: var(--fill2); stroke: var(--line2); }
.drawing .core { fill: var(--card2); stroke: var(--line2); stroke-dasharray: 2 3; }
.drawing .life { stroke: var(--soft); stroke-dasharray: 3 4; }
.drawing .arrow { stroke: var(--line2); stroke-width: 1.6; fill: none; }
.drawing .head, .drawing .dot { fill: var(--line2); }
.drawing .lost { stroke: var(--bad); stroke-dasharray: 6 4; }
.drawing .loss { fill: var(--bad); }
""".strip()


@dataclass(frozen=True)
class Step:
    """A message from one lane to another, or an activity of one lane."""

    source: str
    target: str
    text: str
    #: The message does not arrive, or the process is killed.
    is_lost: bool = False


@dataclass(frozen=True)
class Journey:
    """A sequence diagram."""

    title: str
    lanes: tuple[str, ...]
    steps: tuple[Step, ...]


def at(lane: str, text: str, *, is_lost: bool = False) -> Step:
    """Return an activity of a lane."""
    return Step(lane, lane, text, is_lost)


JOURNEYS = {
    "gradient": Journey(
        "A gradient's journey: a message is repeated, and its gradient counts once",
        ("your loop", "trainer", "pserver 0", "pserver 1"),
        (
            Step("your loop", "trainer", "model.step(gradients)"),
            at("trainer", "check names, shapes, numbers;\ncut into blocks"),
            Step("trainer", "pserver 0", "batch 3/17/2:\ngradients of blocks 0, 1"),
            at("pserver 0", "has block 0 applied it before?\nno: mark it as applied"),
            at("pserver 0", "round complete: the optimizer\nmakes version 406"),
            Step("pserver 0", "trainer", "accepted; new values"),
            Step("trainer", "pserver 1", "batch 3/17/2: gradients of block 2"),
            at("pserver 1", "mark it, update block 2"),
            Step("pserver 1", "trainer", "the connection breaks: no answer", is_lost=True),
            Step("trainer", "pserver 1", "the same message again"),
            at("pserver 1", "already applied:\nchange nothing"),
            Step("pserver 1", "trainer", "already applied; new values"),
            Step("trainer", "your loop", "model is up to date"),
        ),
    ),
    "task": Journey(
        "A task's journey: its trainer is killed, and no batch is lost or counted twice",
        ("etcd", "master", "trainer 0", "trainer 1"),
        (
            Step("trainer 0", "master", "give me tasks"),
            Step("master", "etcd", "store: task 17\nis trainer 0's"),
            Step("master", "trainer 0", "task 17, attempt 1"),
            at("trainer 0", "read the files; push batches\n17/0 and 17/1"),
            at("trainer 0", "kill -9", is_lost=True),
            at("master", "its lease ends: task 17\nreturns to the queue"),
            Step("master", "etcd", "store the queue"),
            Step("trainer 1", "master", "give me tasks"),
            Step("master", "trainer 1", "task 17, attempt 2"),
            at("trainer 1", "push 17/0, 17/1: already\napplied; push 17/2, 17/3"),
            Step("trainer 1", "master", "task 17 is done, in these pservers"),
            Step("master", "etcd", "store: done"),
            at("master", "end of the epoch: ask each\npserver what it has applied"),
        ),
    ),
    "row": Journey(
        "A row's journey: from an id to a checkpoint",
        ("your loop", "trainer", "pserver of the bucket", "checkpoint storage"),
        (
            Step("your loop", "trainer", "users.pull(ids)"),
            at("trainer", "id → bucket → pserver;\neach id once"),
            Step("trainer", "pserver of the bucket", "ids"),
            at("pserver of the bucket", "no row yet: compute its first\nvalues from the id, store nothing"),
            Step("pserver of the bucket", "trainer", "values"),
            Step("your loop", "trainer", "users.push(ids, gradients)"),
            at("trainer", "sum the gradients\nof the same id"),
            Step("your loop", "trainer", "model.step(gradients)"),
            Step("trainer", "pserver of the bucket", "gradients of rows,\nin the step's message"),
            at("pserver of the bucket", "batch applied before? no:\ncreate the row and update it"),
            Step("pserver of the bucket", "checkpoint storage", "rows that have changed\nsince the last checkpoint"),
            at("pserver of the bucket", "unused for 3 epochs: evict it"),
        ),
    ),
}


def drawn(journey: Journey) -> str:
    """Return the drawing as SVG."""
    gap = _WIDTH / len(journey.lanes)
    x_of = {lane: gap * (number + 0.5) for number, lane in enumerate(journey.lanes)}
    y, body = _TOP, []
    for number, step in enumerate(journey.steps, start=1):
        lines = step.text.split("\n")
        x, to = x_of[step.source], x_of[step.target]
        if step.source == step.target:
            body.append(_activity(x, y, lines, is_lost=step.is_lost))
            mark, y = (x - 108, y), y + _LINE * len(lines) + 26
        else:
            y += _LINE * len(lines)
            body.append(_message(x, to, y, lines, is_lost=step.is_lost))
            mark, y = (x, y), y + 20
        body.append(f'<circle class="dot" cx="{mark[0]:g}" cy="{mark[1]:g}" r="9"/>')
        body.append(f'<text class="number" x="{mark[0]:g}" y="{mark[1] + 4:g}">{number}</text>')
    lanes = []
    for lane, x in x_of.items():
        lanes.append(f'<line class="life" x1="{x:g}" x2="{x:g}" y1="58" y2="{y:g}"/>')
        lanes.append(f'<rect class="box" x="{x - 88:g}" y="30" width="176" height="28" rx="6"/>')
        lanes.append(_text(x, 49, lane, "title"))
    return _svg(journey.title, y + 10, [*lanes, *body])


def _svg(title: str, height: float, body: list[str]) -> str:
    head = (
        f'<svg class="drawing" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title)}">\n<style>\n{_STYLE}\n</style>\n<title>{escape(title)}</title>\n'
        f'<rect class="card" width="{_WIDTH}" height="{height:g}" rx="8"/>\n{_text(_WIDTH / 2, 19, title, "title")}'
    )
    return "\n".join([head, *body, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _activity(x: float, y: float, lines: list[str], *, is_lost: bool) -> str:
    height = _LINE * len(lines) + 12
    kind = "box lost" if is_lost else "box"
    box = f'<rect class="{kind}" x="{x - 108:g}" y="{y:g}" width="216" height="{height}" rx="6"/>'
    return "\n".join([box, *(_text(x, y + 18 + _LINE * row, line) for row, line in enumerate(lines))])


def _message(x: float, to: float, y: float, lines: list[str], *, is_lost: bool) -> str:
    way = 1 if to > x else -1
    end = to - way * (60 if is_lost else 3)
    arrow = f'<path class="arrow{" lost" if is_lost else ""}" d="M{x:g} {y:g}H{end - way * 8:g}"/>'
    tip = f'<path class="head{" loss" if is_lost else ""}" d="M{end:g} {y:g}l{-way * 10} -5v10z"/>'
    above = (y - 7 - _LINE * (len(lines) - 1 - row) for row in range(len(lines)))
    texts = [_text((x + to) / 2, at_y, line, "over") for at_y, line in zip(above, lines, strict=True)]
    return "\n".join([arrow, tip, *texts])


def architecture() -> str:
    """Return the drawing of the processes and of what they exchange, as SVG."""
    body = []
    for x, title, package, core in (
        (120, "trainer: your script", "flightedl/client", "domain/trainer"),
        (450, "master, and standbys", "flightedl/master", "domain/master"),
        (780, "pserver: one per shard", "flightedl/pserver", "domain/pserver"),
    ):
        body.append(f'<rect class="box" x="{x - 110}" y="40" width="220" height="120" rx="8"/>')
        body += [_text(x, 62, title, "title"), _text(x, 82, package)]
        body.append(f'<rect class="core" x="{x - 80}" y="96" width="160" height="48" rx="6"/>')
        body += [_text(x, 116, core), _text(x, 134, "decides, without I/O")]
    body += [
        _message(230, 340, 104, ["tasks", "joins, reports"], is_lost=False),
        _message(340, 230, 118, [""], is_lost=False),
        _message(560, 670, 104, ["views", "orders, audits"], is_lost=False),
        _message(670, 560, 118, [""], is_lost=False),
        '<path class="arrow" d="M120 160V206H780V170"/><path class="head" d="M780 160l-5 10h10z"/>',
        '<path class="head" d="M120 160l-5 10h10z"/>',
        _text(450, 200, "gradients and values: Arrow Flight, or shared memory on the same host", "over"),
        '<path class="arrow" d="M450 160V184M450 212V256"/><path class="head" d="M450 264l-5 -10h10z"/>',
        '<path class="arrow" d="M800 160V256"/><path class="head" d="M800 264l-5 -10h10z"/>',
        '<rect class="box" x="300" y="264" width="300" height="48" rx="8"/>',
        _text(450, 284, "etcd", "title"),
        _text(450, 302, "leases, who leads, the queue's state"),
        '<rect class="box" x="660" y="264" width="230" height="48" rx="8"/>',
        _text(775, 284, "checkpoint storage", "title"),
        _text(775, 302, "any URL: a disk, S3, GCS"),
    ]
    return _svg("The processes of a job", 326, body)


def write(folder: Path = HERE) -> None:
    """Write all drawings to a folder."""
    for name, journey in JOURNEYS.items():
        (folder / f"{name}.svg").write_text(drawn(journey), "utf-8")
    (folder / "architecture.svg").write_text(architecture(), "utf-8")


if __name__ == "__main__":
    write()
