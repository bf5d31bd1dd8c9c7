"""Rounds, applied sets and views together: exactly once, in lock step, without deadlock, whatever happens."""

from __future__ import annotations

import pytest

from flightedl.domain.consistency.modes import Async, Bounded, Sync
from flightedl.errors import MessageError

from .cluster_of_rounds import FLAWS, FLAWS_OF_CHANGES, MODES, World

SEEDS = 300


def run(seed, mode, flaws=(), **more):
    try:
        World(seed, mode, flaws, **more).run()
    except (AssertionError, MessageError) as error:
        raise AssertionError(f"seed {seed}, {mode}: {error}") from error


@pytest.mark.parametrize("start", range(0, SEEDS, 50))
def test_every_batch_counts_exactly_once_in_sync_mode(start):
    for seed in range(start, start + 50):
        run(seed, Sync())


@pytest.mark.parametrize("mode", [Sync(backup=1), Bounded(staleness=0), Bounded(staleness=2), Async()], ids=str)
def test_every_batch_counts_exactly_once_in_the_other_modes(mode):
    for seed in range(60):
        run(seed, mode)


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_planted_bug_is_found(flaw):
    for seed in range(SEEDS):
        try:
            World(seed, Sync(), {flaw}).run(limit=8000)
        except (AssertionError, MessageError):
            return
    pytest.fail(f"{SEEDS} runs did not notice: {flaw}")


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_batch_counts_exactly_once_while_the_mode_changes(mode):
    for seed in range(60):
        run(seed, mode, changes=True)


@pytest.mark.parametrize("flaw", FLAWS_OF_CHANGES)
def test_a_planted_bug_in_changing_the_mode_is_found(flaw):
    for seed in range(SEEDS):
        try:
            World(seed, MODES[seed % len(MODES)], {flaw}, changes=True).run(limit=8000)
        except (AssertionError, MessageError):
            return
    pytest.fail(f"{SEEDS} runs did not notice: {flaw}")
