"""Where the time with the parameter servers goes: sending, waiting for others, receiving."""

from __future__ import annotations

import threading
import time

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.client.model.probe import StepProbe
from flightedl.client.profile import PULL, PUSH, WAIT, LoopProfile
from flightedl.domain.consistency.modes import Async, Sync

from .pserver_bench import Cluster


def test_time_counts_for_the_phase_that_it_was_spent_in() -> None:
    probe = StepProbe(iter([0.0, 0.0, 2.0, 5.0, 5.5, 6.0]).__next__)
    probe.begin(WAIT)
    for phase in (PUSH, WAIT, PULL, ""):
        probe.turn(phase)
    assert probe.seconds == {WAIT: 3.0, PUSH: 2.0, PULL: 0.5}
    probe.begin(PULL)
    assert probe.seconds == {}


def test_who_is_waited_for_in_a_round_is_told_from_what_is_sent() -> None:
    gradient = {"w": np.ones(4, np.float32)}
    with Cluster({"w": (4,)}, Sync(), members=2, pservers=2) as cluster:
        quick, slow = cluster.trainer(1), cluster.trainer(2)
        quick.parameters.profile = LoopProfile(SystemClock().now)
        quick.begin(0)
        slow.begin(0)
        steps = threading.Thread(target=lambda: quick.step(0, gradient))
        steps.start()
        while any(shard.waits_for() != (0, [2]) for shard in cluster.shards if shard.numbers):
            time.sleep(0.001)
        seen_at = time.monotonic()
        while time.monotonic() < seen_at + 0.2:
            time.sleep(0.01)
        slow.step(0, gradient)
        steps.join()
        spent = quick.parameters.profile.take()
    assert spent[WAIT] > 0.19
    assert spent[WAIT] > 0.7 * sum(spent.values())
    assert spent[PUSH] > 0


def test_who_waits_for_nobody_only_sends() -> None:
    with Cluster({"w": (4,)}, Async()) as cluster:
        trainer = cluster.trainer(1)
        trainer.parameters.profile = LoopProfile(SystemClock().now)
        for batch in range(30):
            trainer.begin(batch)
            trainer.step(batch, {"w": np.ones(4, np.float32)})
        spent = trainer.parameters.profile.take()
    assert spent[PUSH] > 0.8 * sum(spent.values())
