"""Initialization of the model from scratch, after a pserver has died whose values are not in any checkpoint.

In a job without checkpoints, or before the first one, a pserver that dies loses its values. Its successor *lacks* them:
an election shows that the model was initialized, but there is nothing to load. If only a part of the model were
reinitialized, the model would be inconsistent, so all of it is initialized again, in these steps:

* The master restarts all other pservers with blocks, so that their successors lack their values as well.
* When all of these lack the values of the same election, the master forgets which pservers are *settled*. It then
  deletes the election in a transaction that requires all of their processes to be alive.
* Pservers wait for initial values, as in a new job. Trainers notice that their election is gone, and exit. They are
  restarted, because only the user's script can initialize a model, and one of them is elected.
* Pservers announce that they have applied no batches, so every task is assigned again.

Only the deletion is stored. If the master dies before the deletion, its successor gets the same answers from the same
pservers. Each answer names the election, so a late answer about an old election cannot end a newer one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LostValues:
    """A pserver process that lacks the values of an election (its create_revision)."""

    generation: int
    election: int


@dataclass(frozen=True, slots=True)
class RestartServers:
    """Restart these processes (index -> generation)."""

    generations: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Reinitialize:
    """Delete the election, provided that all these processes (index -> generation) are still alive."""

    election: int
    generations: Mapping[int, int]


def next_step(
    holders: Collection[int],
    present: Mapping[int, int],
    lacking: Mapping[int, LostValues],
    settled: Mapping[int, int],
    *,
    may_be_saved: bool,
) -> RestartServers | Reinitialize | None:
    """Return the next step for pservers that lack their values, or None if none is due yet.

    Args:
        holders: Indexes of the pservers that have blocks. The others have nothing to lose, and are not awaited.
        present: Index -> generation of the live processes.
        lacking: Index -> the lost values, as reported by a process.
        settled: Index -> generation of the processes that have values.
        may_be_saved: True if there is a checkpoint, or one that may still become complete.
    """
    # The report may arrive after the process has received values. A settled process lacks nothing.
    now = {
        index: each for index, each in lacking.items() if present.get(index) == each.generation != settled.get(index)
    }
    if may_be_saved or not now:
        return None
    election = max(each.election for each in now.values())
    ready = {index: each.generation for index, each in now.items() if each.election == election}
    if ready.keys() >= set(holders):
        return Reinitialize(election, ready)
    having = {
        index: generation
        for index, generation in present.items()
        if index in holders and settled.get(index) == generation
    }
    return RestartServers(having) if having else None
