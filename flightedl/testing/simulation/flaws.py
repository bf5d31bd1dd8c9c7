"""Bugs that a run can be given, in what the simulation models itself; see ``planted`` for those in the product."""

from __future__ import annotations

#: Name -> what goes wrong.
FLAWS: dict[str, str] = {
    "no dedupe": "a pserver applies a batch that it has already",
    "apply before check": "a pserver applies a gradient before it looks at who sent it",
    "snapshot without applied": "a checkpoint has values without the batches that are in them",
    "marks of the open round are saved": "a checkpoint says that it has batches which wait in an accumulator",
    "marks after the cut are saved": "a checkpoint says that it has batches which came after its copy",
    "hashes are not compared": "a damaged shard file is loaded",
    "reported before it is written": "a pserver reports its file before it is in the store",
    "old views are taken": "a pserver follows a deposed master",
    "dispatch before durable": "a trainer is given work before that is stored",
    "pointer before manifest": "the pointer moves before the manifest is there",
    "sums are taken twice": "a block that has some batches of a sum takes the sum all the same",
    "only the first of a sum is marked": "a block takes a sum and does not note all of its batches",
    "a mode begins anywhere": "pservers change the mode without agreeing on a round",
    "writes are not fenced": "a master's writes do not compare the lock",
}
