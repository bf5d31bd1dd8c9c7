"""Simulation of a whole cluster in one process, from one seed: all processes, etcd, the store, the network and time.

All decisions are made by the production code of ``flightedl.domain``: the cores of masters, trainers and pservers. The
modules here simulate everything around the cores:

* ``world``: virtual time; processes that die and freeze; a network that loses, duplicates, delays and blocks messages
* ``etcd``, ``store``: models of the two external systems, with outages, unknown outcomes and damaged files
* ``master``: driver of the master's core, with ``taking_over``, ``links`` to the pservers and ``store_worker``
* ``pserver``: driver of the pserver's core, with ``shard`` for its blocks, ``ledger`` for their values and ``rows``
* ``trainer``: driver of a trainer's cores, with ``loop``, ``body``, ``worker``, ``transfers``, ``first_values`` and
  ``evaluating``
* ``job``: the ledger program, including some data that no trainer can process
* ``scenario``: the job, the programs and the fault rates that follow from a seed
* ``cluster``: all processes, and the supervisor that restarts them
* ``strikes``: random faults
* ``account``, ``row_account``: the invariants, checked against everything that is assigned, done, stored and reported
* ``planted``: bugs planted in the product's source; ``planted_master``, ``planted_pserver``, ``planted_trainer`` and
  ``bugs`` list them
* ``runs``: running many seeds in several processes
* ``recorded``: recordings of the simulated processes

The invariants, in addition to every ``check`` in the domain:

1. *The ledger*: at the end, every block contains every batch of every epoch exactly once, and at no time a batch twice.
2. Each task is in exactly one state at every stored revision, and no attempt is assigned to two trainers.
3. A report is not counted if it names an old generation of a pserver, or an attempt that is not current.
4. A deposed master does not write its state, and no pserver follows its view.
5. The checkpoint that the pointer names is complete, and so is every newer one that has a manifest.
6. A round closes only when all its expected members have contributed. A checkpoint at a round contains all blocks as of
   that round. An update contains the batches that it names and no others, each with its share: its records' share in a
   mean, 1 in a sum, scaled by staleness if the mode requires it. A batch that is pushed again keeps the share that it
   had in the sum in which its trainer pushed it first.
7. When faults end, the job ends. When the master reports the job as done, every pserver has applied everything and no
   round waits. After a job was stopped, every batch is in all blocks or in none, also in its last checkpoint.
8. No audit finds that a task counted as done is missing. The audit would repeat the task and so hide the error.
9. A trainer holds or returns every task that it is assigned, under its current registration. An answer about one
   attempt revokes no other.
10. Batches that no trainer can process are quarantined one by one; without other faults, no other batches are.
11. The result of an evaluation contains each of its batches once, weighted by records, whichever trainers measured it
    and however often. It belongs to the life of the model for which it was requested.
12. If a pserver was told to end and reports that a checkpoint has everything it had then, the report is right.
13. No member adds to a round before all blocks that wait for it have closed the previous round. So all values from
    which a batch is computed belong to one round. Exceptions: ``backup``, and programs that gave up a push.
14. A trainer that reads the result of a finished job reads everything that was trained.
15. At the end, all blocks descend from the initial values of one election, however often the model started over.
16. A block's values, slots, version and step number belong to one moment when served or saved, and at the end.
17. Table rows that are served or saved, and ids that wait for admission, are those that follow from their bucket's
    updates and cuts under the rules of admission and eviction.

Not covered: threads within a process, and bytes (streams, files). These have separate tests.

``python -m flightedl.testing.simulation --seeds 300`` runs it.
"""

from flightedl.testing.simulation.bugs import BUGS
from flightedl.testing.simulation.cluster import Cluster, Outcome
from flightedl.testing.simulation.runs import Found, Summary, run_seed, run_seeds
from flightedl.testing.simulation.world import Violation

__all__ = ["BUGS", "Cluster", "Found", "Outcome", "Summary", "Violation", "run_seed", "run_seeds"]
