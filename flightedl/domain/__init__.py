"""The pure core: everything that decides, as state machines without I/O, threads or a clock.

A state machine takes an event (and ``now``, where time matters) and returns effects or an answer; a thin shell around
it (``flightedl.master``, ``pserver``, ``client``) carries them out. Most have ``check()``, which asserts their
invariants; tests call it after every step. Of the package it imports only ``errors`` and ``messages``.

The cores, one for each kind of process. The real process and the simulated one run the same.

* ``master``: what a master decides: work, members, views, checkpoints, recovery, the end of the job.
* ``pserver``: what a pserver decides, from taking an index to its end.
* ``trainer``: what a trainer decides: its tasks, their batches, its membership.

Beside them, as it decides nothing: ``diagnosis``, which says what is wrong with a job from what its processes say.
``retries`` classifies errors: which are worth another attempt, and for how long to try. ``tenure`` decides how long the
holder of a leased key may act.

The machines they are made of, each package without knowledge of the ones above it in this list:

* ``model``: parameters, blocks and shards, and the settings that users choose.
* ``tables``: embedding tables: what is declared of them, where their rows lie, and what becomes of a row.
* ``exactly_once``: what makes a push count once, whoever sends it and however often.
* ``recovery``: what is done again after something was lost.
* ``checkpoint``: when one is made, what makes it complete, and who reads what of it.
* ``consistency``: when a block takes its updates, and who waits for whom.
* ``queue``: which trainer does which batches of which epoch.
* ``moving``: blocks that move from one pserver to another while the job trains.
* ``groups``: rounds of ranks that train a model of their own, and the starts of their group.
* ``scaling``: how many trainers are worth having. It stands beside the others.
"""
