"""Layout of keys in etcd."""

from __future__ import annotations

import pytest

from flightedl.coordination.keys import JobKeys

KEYS = JobKeys("demo")


def test_the_layout_is_the_documented_one() -> None:
    assert KEYS.prefix == "/flightedl/demo/"
    names = {
        KEYS.master_lock: "master/lock",
        KEYS.master_address: "master/addr",
        KEYS.ps_desired: "ps_desired",
        KEYS.pserver(3): "ps/3",
        KEYS.trainer("t-1"): "trainers/t-1",
        KEYS.consumer("serving"): "consumers/serving",
        KEYS.acknowledgement("serving", 3): "acknowledged/serving/3",
        KEYS.job: "job",
        KEYS.init_params: "init_params",
        KEYS.checkpoint_latest: "checkpoint/latest",
    }
    assert all(key == KEYS.prefix + name for key, name in names.items())


def test_keys_that_only_masters_read_are_outside_the_watched_prefix() -> None:
    assert KEYS.state_prefix == "/flightedl-state/demo/"
    names = {
        KEYS.task_queues: "task_queues",
        KEYS.task_failures: "task_failures",
        KEYS.evaluations: "evaluations",
        KEYS.membership: "membership",
        KEYS.pserver_recovery: "pserver_recovery",
    }
    assert all(key == KEYS.state_prefix + name for key, name in names.items())


@pytest.mark.parametrize(
    "name", ["ps_desired", "ps/", "ps/x", "ps/-1", "ps/01", "ps/1/2", "ps/\u00b2", "trainers/1", "job"]
)
def test_other_keys_parse_to_no_pserver(name: str) -> None:
    assert KEYS.pserver_index(KEYS.prefix + name) is None


def test_parsing_a_key_returns_its_parts() -> None:
    assert [KEYS.pserver_index(KEYS.pserver(i)) for i in (0, 7, 10, 123)] == [0, 7, 10, 123]
    assert KEYS.trainer_id(KEYS.trainer("host-1")) == "host-1"
    assert KEYS.trainer_id(KEYS.trainers) is None
    assert KEYS.trainer_id(KEYS.pserver(1)) is None
    assert KEYS.consumer_name(KEYS.consumer("serving")) == "serving"
    assert KEYS.consumer_name(KEYS.consumers) is None
    assert KEYS.consumer_name(KEYS.acknowledgement("serving", 1)) is None
    assert JobKeys("other").pserver_index(KEYS.pserver(1)) is None
    assert JobKeys("other").trainer_id(KEYS.trainer("a")) is None
