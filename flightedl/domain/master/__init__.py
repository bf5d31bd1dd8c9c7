"""The master's decisions, as a pure state machine that runs in the master process and in the simulation.

* ``core``: the state machine, which delegates to the other modules
* ``events``: input of the core; ``effects``: output of the core
* ``leases``: the trainers that hold a live lease; ``presence``: which processes have died before their leases end
* ``declaring``: the declared dataset and model; ``differences``: how two declarations differ
* ``training``: assigns training tasks; ``work``: the queue of one dataset, as trainers see it
* ``deterministic_schedule``: delays that make runs bit-identical; ``epoch_ends``: members at the end of an epoch
* ``evaluations``: evaluations, each with its own dataset and queue
* ``groups``: requests from the ranks of a group, which reads the training data in rounds
* ``members``: the membership, and the views to be sent
* ``pservers``: the master's knowledge of the pservers; ``control``: its calls to them; ``pserver_warnings``: warnings
* ``moves``: changes to the number of pservers, for which blocks move; ``stored_moves``: their transactions
* ``checkpointing``: orders of checkpoints
* ``ending``: conditions under which an epoch ends and the job is done
* ``requests``: a waiting request
* ``state``: the master's settings and initial state; ``stored``: the etcd keys that hold the stored state

A trainer's ticket arrives as the event ``Asked``. The core checks the trainer's lease, rejects reports of work that
pservers have since lost (``pservers``), and applies the other reports to the queue (``work``). It then assigns tasks
(``training``), updates the membership (``members``), and emits the reply as an ``Answer``. If there is no task to
assign, the ticket waits.

The driver carries out an effect only after the core's state has been stored at the effect's revision or a later one. A
successor therefore knows everything that the master has announced. Only events change the core, so the same events at
the same times produce the same effects.
"""
