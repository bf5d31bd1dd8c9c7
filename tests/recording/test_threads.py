"""Recorded concurrent requests of a trainer's threads to real pservers replay without differences."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.consistency.modes import Async, Mode
from flightedl.domain.trainer.steps import Steps
from flightedl.errors import UnavailableError
from flightedl.recording.reader import Recording, recordings_in
from flightedl.recording.recorded import recorded
from flightedl.recording.replay import replay
from flightedl.recording.writer import SUFFIX, Recorder
from tests.simulation.bugs import CORE_BUGS
from tests.support.planting import planted

from ..client.pserver_bench import Cluster

SHAPES = {"a": (9000,), "b": (9000,), "c": (5, 5)}


def record(path: Path, mode: Mode, member: int = 1) -> Recording:
    """Record a trainer that loses the connection to a pserver during its second push."""
    lines: list[bytes] = []
    recorder = Recorder("trainer", "1", "demo", SystemClock(), lines.append, is_strict=True)
    gradients = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    with Cluster(SHAPES, mode, pservers=2) as cluster:
        about = {"trainer": "t1"}
        trainer = cluster.trainer(member, steps=partial(recorded, recorder, about, Steps), give_up_s=0.05)
        model, present = trainer.parameters, cluster.present[1]
        for batch in range(4):
            trainer.begin(batch)
            cluster.present[1] = UnavailableError("nobody is there") if batch == 1 else present
            with contextlib.suppress(UnavailableError):
                model.push({"a": gradients["a"]}) if batch == 0 else model.step(gradients)
            cluster.present[1] = present
            model.close_batch()
        model.pull(["b"])
        value = float(model["b"][0])
    assert (value != 0) == (member == 1)
    (path / f"1{SUFFIX}").write_bytes(b"".join(lines))
    (recording,) = recordings_in(path)
    return recording


@pytest.mark.parametrize("mode", [Async(), Async(push_every=2)], ids=str)
def test_concurrent_requests_to_several_pservers_replay_without_differences(tmp_path: Path, mode: Mode) -> None:
    recording = record(tmp_path, mode)
    assert replay(recording).difference is None
    sent = [bytes(record.effects) for _, record in recording.records() if b'"Transfer"' in bytes(record.effects)]
    assert sum(b'"bases"' in effects for effects in sent) >= 2


@pytest.mark.parametrize(
    ("bug", "mode", "member"),
    [
        ("a batch that failed arrives all the same", Async(), 1),
        ("a sum that failed counts as taken", Async(push_every=2), 1),
        ("a lost sum counts as taken", Async(push_every=2), 2),
    ],
)
def test_a_replay_reveals_a_bug_in_pushes_that_fail(tmp_path: Path, bug: str, mode: Mode, member: int) -> None:
    recording = record(tmp_path, mode, member)
    assert replay(recording).difference is None
    with planted([CORE_BUGS[bug]]):
        difference = replay(recording).difference
    assert difference is not None
    assert difference.core == "steps-1"
    assert difference.expected != difference.actual
