"""When the model gets first values anew: a pserver died with the first ones, and no checkpoint has them.

Until the first checkpoint is complete, or for ever where none are kept, a pserver that dies takes its values along. Its
successor *lacks* them: it finds that an election has given the model its first values, and has nothing to load. A model
of which a part starts again while the rest goes on would be neither of the two, so everybody goes back:

1. pservers that have values are sent back: each ends, and its successor lacks them too;
2. when all lack the values of the same election, that election is deleted, in a transaction that names all of these
   processes; its queue's account was reset before (nobody is *settled*);
3. pservers wait for first values, as in a new job. Trainers find that the election is not theirs any more, end and are
   started again, for only the user's script can make first values; one of them is elected.
4. The pservers announce that nothing is applied, so every task is dispatched again.

Nothing of this is stored but by the deletion itself: a master that dies on the way is followed by one that hears the
same from the same pservers. The election's revision travels with what is said, so that a late word about an old
election never ends a newer one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LostValues:
    """A pserver process without values, and the election (its create_revision) whose values it should have."""

    generation: int
    election: int


@dataclass(frozen=True, slots=True)
class RestartServers:
    """These processes (index -> generation) have to end."""

    generations: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Reinitialize:
    """Delete the election, if all these processes (index -> generation) are still there."""

    election: int
    generations: Mapping[int, int]


def next_step(
    pserver_count: int,
    present: Mapping[int, int],
    lacking: Mapping[int, LostValues],
    settled: Mapping[int, int],
    *,
    may_be_saved: bool,
) -> RestartServers | Reinitialize | None:
    """What is to be done about pservers that lack their values; None: nothing, or not yet.

    Args:
        pserver_count: Of the job.
        present: index -> generation of the processes that are there.
        lacking: index -> what a process of it said.
        settled: index -> generation of the processes that have values.
        may_be_saved: Whether there is a checkpoint, or one that may still become complete.
    """
    # What a process said before it was given values may be heard after: one that is settled lacks nothing any more.
    now = {
        index: each for index, each in lacking.items() if present.get(index) == each.generation != settled.get(index)
    }
    if may_be_saved or not now:
        return None
    election = max(each.election for each in now.values())
    ready = {index: each.generation for index, each in now.items() if each.election == election}
    if len(ready) == pserver_count:
        return Reinitialize(election, ready)
    having = {
        index: generation
        for index, generation in present.items()
        if index < pserver_count and settled.get(index) == generation
    }
    return RestartServers(having) if having else None
