"""Where a trainer's loop says that its time goes."""

from __future__ import annotations

from flightedl.client.profile import DATA, PULL, PUSH, SCRIPT, WAIT, LoopProfile


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_time_counts_for_what_was_done_until_the_next_thing() -> None:
    clock = Clock()
    profile = LoopProfile(clock)
    for what, seconds in ((DATA, 1.0), (SCRIPT, 4.0)):
        profile.does(what)
        clock.now_s += seconds
    before = profile.does(PUSH)
    clock.now_s += 2.0
    profile.pushed(before, {PUSH: 0.5, WAIT: 1.0, PULL: 0.5})
    clock.now_s += 3.0
    assert profile.take() == {DATA: 1.0, SCRIPT: 4.0, PUSH: 0.5, WAIT: 1.0, PULL: 0.5}
    profile.does("")
    clock.now_s += 100.0
    profile.does(DATA)
    assert profile.take() == {SCRIPT: 3.0}


def test_what_could_not_be_told_is_told_next_time() -> None:
    clock = Clock()
    profile = LoopProfile(clock)
    profile.does(DATA)
    clock.now_s += 1.0
    profile.does(SCRIPT)
    profile.give_back(profile.take())
    clock.now_s += 1.0
    profile.does(DATA)
    assert profile.take() == {DATA: 1.0, SCRIPT: 1.0}
    assert profile.take() == {}
