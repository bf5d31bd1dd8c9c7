"""Decisions of the master, as a pure state machine that a process or the simulation drives.

* ``core``: the state machine, which delegates to the modules below
* ``events``: its inputs; ``effects``: its outputs
* ``leases``: trainers whose lease is alive
* ``declaring``: the declared dataset and model; ``differences``: comparison of two declarations
* ``training``: assignment of the training data; ``work``: one dataset's queue as trainers see it
* ``deterministic_schedule``: waiting that makes runs bit-identical; ``epoch_ends``: membership at the end of an epoch
* ``evaluations``: datasets for evaluation, each with its own queue
* ``groups``: ranks of a group, which share the training data
* ``members``: the membership and its views
* ``pservers``: state of the pservers; ``control``: calls to them; ``vigil``: warnings from their status
* ``checkpointing``: orders of checkpoints
* ``ending``: conditions for the end of an epoch and of the job
* ``requests``: a waiting request
* ``state``: settings and initial state; ``stored``: keys of the state in etcd

A trainer's ticket arrives as the event ``Asked``. The core verifies the trainer's lease, drops reports of work that
pservers have lost (``pservers``), applies the other reports to the queue (``work``), assigns tasks (``training``),
updates the membership (``members``), and emits the reply as an ``Answer``. Without tasks to assign, the ticket waits.

The driver carries out an effect only after the core's state of the effect's revision is stored, so a successor knows
everything that the master has announced. Only events change the core: the same events at the same times have the same
effects.
"""
