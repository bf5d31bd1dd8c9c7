"""Where the time with the parameter servers goes: sending, waiting for others, receiving."""

from __future__ import annotations

import threading
import time

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.client.model.phases import Phases
from flightedl.client.profile import PULL, PUSH, WAIT, LoopProfile
from flightedl.domain.consistency.modes import Async, Sync

from .pserver_bench import Cluster


def test_a_push_lasts_until_all_is_answered_and_a_wait_until_values_come() -> None:
    now = 0.0
    phases = Phases(lambda: now)
    phases.begin(WAIT)
    phases.sends()
    phases.sent()
    now = 1.0
    phases.answered()
    phases.sent()
    phases.sent_all()
    now = 2.0
    phases.answered()
    now = 5.0
    phases.values_came()
    now = 5.5
    phases.values_came()
    phases.end()
    assert phases.seconds == {WAIT: 3.0, PUSH: 2.0, PULL: 0.5}


def test_values_that_come_with_the_answers_cost_nothing_of_their_own() -> None:
    now = 0.0
    phases = Phases(lambda: now)
    phases.begin(WAIT)
    phases.sends()
    phases.sent()
    phases.sent_all()
    now = 1.0
    phases.values_came()
    phases.answered()
    phases.end()
    assert phases.seconds == {WAIT: 0.0, PUSH: 1.0}


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
