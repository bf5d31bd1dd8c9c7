"""Output of `flightedl doctor`, and the page that it writes."""

from __future__ import annotations

from dataclasses import replace

import click
import msgspec

from flightedl.domain.diagnosis.examine import examine
from flightedl.domain.diagnosis.findings import Cause, Finding, Severity, Wait
from flightedl.domain.diagnosis.observations import Asked, Observations
from flightedl.domain.diagnosis.trainers import waits
from flightedl.messages.hosts import HostFacts
from flightedl.messages.status import (
    JobEvent,
    PserverStatusReply,
    ServerStatus,
    StatusReply,
    TaskCounts,
    TrainerStatus,
)
from flightedl_tools.doctor import report_lines
from flightedl_tools.report import report_of

from ..docs.pages import ROOT, sections, sessions_in
from ..docs.shapes import shape

SECRET = "s3://user:secret@bucket/train.csv?token=secret"
FOUND = Finding(
    Cause.TRAINER_IS_SLOW,
    Severity.HARMFUL,
    "t1",
    f"t1 has spent 20 s on one batch of {SECRET}",
    "See what else runs <there>.",
    "thread x\n  a.py:1 f\n\nthread MainThread\n  train.py:3 <module>\n  train.py:9 slow",
)
SEEN = Observations(
    job="demo",
    asker=HostFacts(version="0.1", wall_s=1_700_000_000.0),
    etcd=(Asked(address="e:1", seconds=0.02), Asked(address="e:2", error="<nobody> listens")),
    master=Asked(address="m:1", seconds=0.1),
    status=StatusReply(job="demo", state="training", tasks=TaskCounts(done=3, total=9), pservers_desired=2),
    events=(JobEvent(number=1, at=1_700_000_000.0, kind="trainer_came", text=f"read {SECRET}"),),
    stacks={"pserver-0": "thread <x>"},
)
WAITS = [Wait("round 7 of pserver-1", "t1", 12.4)]


def test_findings_include_advice_and_the_position_of_the_script() -> None:
    lines = report_lines(SEEN, [FOUND], WAITS)
    assert lines[0] == "job demo: training, epoch 1, 3 of 9 tasks done, 0 of 2 pservers, 0 trainers, 0 records/s"
    assert any("harmful" in line and line.endswith("[trainer_is_slow]") for line in lines)
    assert "           train.py:9 slow" in lines
    assert "  round 7 of pserver-1 waits 12 s for t1" in lines


def test_the_output_in_the_page_of_the_commands_is_that_of_a_slow_trainer() -> None:
    slow = TrainerStatus(trainer="vm-8842-1c9f2a", name="trainer-1", generation=3, holding=1, batch_s=24.0)
    server = ServerStatus(
        index=0, address="p:1", generation=2, state="serving", waits_for=[slow.trainer], waits_at=405, waits_s=22.0
    )
    status = StatusReply(
        job="flights",
        state="training",
        tasks=TaskCounts(done=40, todo=80, total=120),
        pservers_desired=2,
        pservers=[server, msgspec.structs.replace(server, index=1, waits_for=[])],
        trainers=[slow],
    )
    answers = {index: Asked(address="p:1", seconds=0.1) for index in range(2)}
    figures = {field.name: 0 for field in msgspec.structs.fields(PserverStatusReply) if field.required}
    reply = PserverStatusReply(**{**figures, "state": "serving", "members": [], "rows": {}})
    seen = replace(
        SEEN,
        etcd=(),
        lock_generation=1,
        address_generation=1,
        status=status,
        stacks={slow.trainer: "thread MainThread\n  job/train.py:31 augment"},
        pservers=answers,
        replies=dict.fromkeys(answers, reply),
    )
    printed = {shape(click.unstyle(line)) for line in report_lines(seen, examine(seen), waits(seen))}
    (block,) = sessions_in(sections(ROOT / "docs" / "commands.md")["`flightedl doctor`"])
    missing = [line for line in block.splitlines() if shape(line.replace("job flights", "job demo")) not in printed]
    assert not missing, printed


def test_a_healthy_job_is_reported_as_healthy() -> None:
    assert report_lines(SEEN, [], [])[-1] == "no problem found"


def test_the_page_shows_all_findings_and_no_secrets() -> None:
    page = report_of(SEEN, [FOUND], WAITS)
    assert "secret" not in page
    assert "See what else runs &lt;there&gt;." in page
    assert "&lt;nobody&gt; listens" in page
    assert "thread &lt;x&gt;" in page
    assert "round 7 of pserver-1" in page
    assert "trainer_came" in page
    assert "src=" not in page
    assert "href=" not in page
