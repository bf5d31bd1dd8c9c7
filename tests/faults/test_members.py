"""Three members of etcd are killed, frozen and cut off from each other during a job: every record counts once."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.errors import FlightedlError
from flightedl.ports import Put

from ..launch.forked_launcher import ForkedCommand
from .members import COUNT, EtcdMembers
from .storm import Storm, verdict
from .strikes import Victims

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow]

SEED = int(os.environ.get("FLIGHTEDL_TEST_SEED", "0"))


def test_a_member_that_is_cut_off_answers_only_when_it_is_back() -> None:
    with EtcdMembers() as members, contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(contextlib.closing(EtcdCoordinator(address, timeout_s=1.0, clock=SystemClock())))
            for address in members.address.split(",")
        ]
        assert connections[0].version()[1] == COUNT
        connections[0].transact([], [Put("/a", b"1")])
        with members.cut(1):
            time.sleep(1.5)
            with pytest.raises(FlightedlError):
                connections[1].transact([], [Put("/a", b"2")])
            connections[2].transact([], [Put("/a", b"3")])
        members.wait_until_healthy()
        found = connections[1].get("/a")
        assert found is not None
        assert found.value == b"3"


@pytest.mark.storm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_nothing_is_lost_while_members_fail(mode: str, tmp_path: Path) -> None:
    storm = Storm(tmp_path, mode, records=16_000, per_task=500, epochs=3, lease_s=4.0, limit_s=300.0)
    chance = random.Random(SEED)

    def rage(process: ForkedCommand, start: float) -> None:
        storm.wait_for(process, start, "epoch 1/")
        victims = Victims(process.pid, chance, storm.lease_s, events=storm.events)
        while process.poll() is None and time.monotonic() - start < storm.limit_s / 2:
            time.sleep(chance.expovariate(1.0))
            number, seconds = chance.randrange(COUNT), chance.uniform(0.5, 3.0)
            kind = chance.choice(["kill", "freeze", "cut off"])
            victims.note(f"{kind} member {number} for {seconds:.1f} s")
            if kind == "kill":
                members.kill(number, down_s=seconds)
            elif kind == "freeze":
                members.freeze(number, frozen_s=seconds)
            else:
                with members.cut(number):
                    time.sleep(seconds)
            storm.done[kind] += 1
            if chance.random() < 0.5:
                victims.kill(chance.choice(("trainer", "pserver", "master")))

    with EtcdMembers() as members:
        code, output = storm.run_with(rage, "--etcd", members.address)
    story = "\n".join([*storm.events, output[-3000:]])
    assert (code, verdict(output)) == (0, (0, 0)), story
    assert not storm.stored_findings(), story
    assert sum(storm.done.values()) >= 5, story
