"""Pservers are added only while they limit the job and more of them would help."""

import pytest

from flightedl.domain.scaling.pservers import PserverLoad, PserverScaling

BUSY = {"pservers": 2, "busy_cores": 1.2, "message_bytes": 1e6, "time": 0.6}


@pytest.mark.parametrize(
    ("more", "wanted", "is_limiting"),
    [
        ({}, 4, True),
        ({"busy_cores": 0.5}, 2, False),
        ({"time": 0.2}, 2, False),
        ({"message_bytes": 1e4}, 2, True),
    ],
    ids=["busy", "idle processors", "trainers that compute", "small messages"],
)
def test_twice_as_many_pservers_are_recommended_only_if_they_help(more, wanted, is_limiting):
    load = PserverLoad(**(BUSY | more))
    assert (load.wanted, load.is_limiting) == (wanted, is_limiting)


def test_pservers_are_added_once_they_have_limited_the_job_for_a_minute():
    scaling = PserverScaling(maximum=3)
    busy, idle = PserverLoad(**BUSY), PserverLoad(**(BUSY | {"time": 0.1}))
    found = [scaling.look(busy if now != 30 else idle, now) for now in range(0, 110, 10)]
    assert found == [None] * 10 + [3]
    assert scaling.look(PserverLoad(**(BUSY | {"pservers": 3})), 200.0) is None
    assert scaling.look(PserverLoad(**(BUSY | {"pservers": 3})), 300.0) is None


def test_a_failed_attempt_is_repeated_after_half_an_hour():
    scaling, busy = PserverScaling(maximum=4), PserverLoad(**BUSY)
    assert [scaling.look(busy, now) for now in (0.0, 60.0)] == [None, 4]
    scaling.failed(100.0)
    found = [scaling.look(busy, now) for now in range(120, 2100, 60)]
    assert found == [None] * 31 + [4, None]
