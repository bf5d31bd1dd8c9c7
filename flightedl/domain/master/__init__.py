"""The master's decisions, as a pure state machine driven by a process or by the simulation.

* ``core``: the state machine, which delegates to the modules below
* ``events``: inputs of the core; ``effects``: outputs of the core
* ``leases``: trainers with a live lease
* ``declaring``: the declared dataset and model; ``differences``: comparison of two declarations
* ``training``: assignment of training tasks; ``work``: the queue of one dataset, as trainers see it
* ``deterministic_schedule``: delays that make runs bit-identical; ``epoch_ends``: membership at the end of an epoch
* ``evaluations``: datasets for evaluation, each with its own queue
* ``groups``: requests from the ranks of a group, which share the training data
* ``members``: the membership and its views
* ``pservers``: state of the pservers; ``control``: calls to pservers; ``pserver_warnings``: warnings about them
* ``checkpointing``: orders of checkpoints
* ``ending``: conditions for the end of an epoch and of the job
* ``requests``: a waiting request
* ``state``: settings and initial state; ``stored``: the etcd keys that store the state

A trainer's ticket arrives as the event ``Asked``. The core verifies the trainer's lease, rejects reports of work that
pservers have since lost (``pservers``), applies the other reports to the queue (``work``), assigns tasks
(``training``), updates the membership (``members``), and emits the reply as an ``Answer``. If there is no task to
assign, the ticket waits.

The driver carries out an effect only once the core's state at the effect's revision, or at a later one, has been
stored, so a successor knows everything that the master has announced. Only events change the core, so the same events
at the same times produce the same effects.
"""
