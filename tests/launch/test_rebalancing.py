"""Blocks of a busy pserver move to the other one by themselves, and every record still counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

import flightedl as fe
from flightedl.launch.programs import TrainerProgram
from flightedl.messages.base import encode
from flightedl.messages.scaling import ScaleReply, ScaleRequest
from flightedl.messages.status import EventsReply, EventsRequest
from tests.support.contracts.coordinator import eventually

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_busy_pserver_gives_away_buckets(tmp_path: Path) -> None:
    """After a change that was cancelled early, one pserver has most buckets of a table that every step uses."""
    arguments = ("--data", str(tmp_path / "data"), "--tables", "--wide-ids", "120000", "--mode", "async")
    arguments += ("--records", "3000", "--epochs", "4", "--pause", "0.1")
    with fe.local(
        pservers=2,
        output_dir=tmp_path / "out",
        rebalance_s=4.0,
        trainers=TrainerProgram("flightedl.examples.ledger", arguments, 2),
    ) as cluster:
        with cluster.status() as status:

            def change(**request: object) -> ScaleReply:
                return status.change("scale", ScaleRequest(**request), ScaleReply, 10.0)  # type: ignore[arg-type]

            def buckets() -> list[int]:
                return [each.buckets for each in status.read(5.0).pservers]

            def rebalanced() -> list[str]:
                events = status.ask("events", encode(EventsRequest()), EventsReply, 5.0).events
                return [event.text for event in events if event.kind == "rebalanced"]

            eventually(lambda: status.read(5.0).tasks.done, timeout_s=60.0)
            change(drain=[1])
            eventually(lambda: change().is_done, timeout_s=60.0)
            change(pservers=2)
            eventually(lambda: change().moved, timeout_s=60.0)
            change(is_cancelled=True)
            text = eventually(rebalanced, timeout_s=60.0)[0]
            assert "of the load of all pservers: blocks move to pserver 1" in text
            load = int(text.partition("%")[0].rpartition(" ")[2]) / 100
            assert load > 2 / 3
            eventually(lambda: sum(buckets()) == 1024 and buckets()[1] > 1.2 * (1 - load) * 1024, timeout_s=60.0)
        assert cluster.outcome(120.0) is not None, "the job does not end"
    logs = [path.read_text() for path in (tmp_path / "out" / "logs").glob("*.log")]
    assert any("0 lost, 0 double" in log for log in logs)
