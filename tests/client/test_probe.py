"""The time that a trainer's loop spends in each phase."""

from __future__ import annotations

import threading
import time

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.client.probe import DATA, PULL, PUSH, SCRIPT, WAIT, StepProbe
from flightedl.client.waiting import Conversation
from flightedl.domain.consistency.modes import Async, Sync

from .pserver_bench import Cluster


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_time_counts_for_the_phase_in_which_it_was_spent() -> None:
    conversation = Conversation(0, iter([0.0, 0.0, 2.0, 5.0, 5.5, 6.0]).__next__)
    conversation.begin(WAIT)
    for phase in (PUSH, WAIT, PULL, ""):
        conversation.turn(phase)
    assert conversation.seconds == {WAIT: 3.0, PUSH: 2.0, PULL: 0.5}
    conversation.begin(PULL)
    assert conversation.seconds == {}


def test_time_counts_for_the_current_phase_until_the_next_one() -> None:
    clock = Clock()
    probe = StepProbe(clock)
    for what, seconds in ((DATA, 1.0), (SCRIPT, 4.0)):
        probe.turn(what)
        clock.now_s += seconds
    before = probe.turn(PUSH)
    quick, slow = Conversation(0, clock), Conversation(1, clock)
    quick.seconds, slow.seconds = {PUSH: 0.1, WAIT: 0.2}, {PUSH: 0.5, WAIT: 1.0, PULL: 0.5}
    clock.now_s += 2.0
    probe.conversations += [quick, slow]
    probe.transferred(before)
    clock.now_s += 3.0
    assert probe.take() == {DATA: 1.0, SCRIPT: 4.0, PUSH: 0.5, WAIT: 1.0, PULL: 0.5}
    probe.turn("")
    clock.now_s += 100.0
    probe.turn(DATA)
    assert probe.take() == {SCRIPT: 3.0}


def test_an_unsent_report_is_included_in_the_next_one() -> None:
    clock = Clock()
    probe = StepProbe(clock)
    probe.turn(DATA)
    clock.now_s += 1.0
    probe.turn(SCRIPT)
    probe.give_back(probe.take())
    clock.now_s += 1.0
    probe.turn(DATA)
    assert probe.take() == {DATA: 1.0, SCRIPT: 1.0}
    assert probe.take() == {}


def test_waiting_for_a_round_is_distinguished_from_sending() -> None:
    gradient = {"w": np.ones(4, np.float32)}
    with Cluster({"w": (4,)}, Sync(), members=2, pservers=2) as cluster:
        probe = StepProbe(SystemClock().now)
        quick, slow = cluster.trainer(1, probe=probe), cluster.trainer(2)
        probe.take()
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
        spent = probe.take()
    assert spent[WAIT] > 0.19
    assert spent[WAIT] > 0.7 * sum(spent.values())
    assert spent[PUSH] > 0


def test_without_a_round_the_time_counts_as_sending() -> None:
    with Cluster({"w": (4,)}, Async()) as cluster:
        probe = StepProbe(SystemClock().now)
        trainer = cluster.trainer(1, probe=probe)
        probe.take()
        for batch in range(30):
            trainer.begin(batch)
            trainer.step(batch, {"w": np.ones(4, np.float32)})
        spent = probe.take()
    assert spent[PUSH] > 0.8 * sum(spent.values())
