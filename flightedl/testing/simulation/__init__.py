"""Simulation of a whole cluster in one process, from one seed: all processes, etcd, the store, the network and time.

All decisions are made by the production code of ``flightedl.domain``: the cores of masters, trainers and pservers. The
modules here simulate everything around the cores:

* ``world``: virtual time, processes that die and freeze, a network that loses, duplicates, delays and cuts off messages
* ``etcd``, ``store``: models of the two external systems, with outages, unknown outcomes and damaged files
* ``master``: driver of the master's core, with ``taking_over``, ``links`` to the pservers and ``store_worker``
* ``pserver``: driver of the pserver's core, with ``shard`` for its blocks, ``ledger`` for their values and ``rows``
* ``trainer``: driver of the trainer's cores, with ``loop``, ``body``, ``worker``, ``transfers``, ``first_values`` and
  ``evaluating``
* ``job``: the ledger program, with some data that nobody can train
* ``scenario``: the job, the programs and the fault rates that follow from a seed
* ``cluster``: all processes, and the supervisor that restarts them
* ``strikes``: random faults
* ``account``, ``row_account``: the invariants, checked against everything that is assigned, done, stored and reported
* ``planted``: bugs that are planted in the product's source; ``planted_master``, ``planted_pserver``,
  ``planted_trainer`` and ``bugs`` list them
* ``runs``: many seeds in several processes
* ``recorded``: recordings of the simulated processes

The invariants, besides every ``check`` of the domain:

1. *The ledger*: at the end, every block has every batch of every epoch exactly once, and at no time a batch twice.
2. Each task is in exactly one state at every stored revision, and no attempt is given to two trainers.
3. A report does not count if it names an old generation of a pserver, or an attempt that is not current.
4. A deposed master does not write its state, and no pserver follows its view.
5. The checkpoint that the pointer names is complete, and so is every newer one that has a manifest.
6. A round closes only when all its expected members have contributed. A checkpoint at a round has all blocks as they
   were at that round. An update contains the batches that it names and no others, each with its share: its records'
   share in a mean, 1 in a sum, scaled by staleness if the mode says so. A batch that is pushed again keeps the share
   that it had in the sum in which its trainer pushed it first.
7. When faults end, the job ends. When the master reports the job as done, every pserver has everything and no round
   waits. After a job was stopped, every batch is in all blocks or in none, also in its last checkpoint.
8. No audit finds a task missing that counts as done. The audit would repeat the task and so hide the error.
9. A trainer holds or returns every task that it is assigned, under its present registration. An answer about one
   attempt takes away no other.
10. Batches that nobody can train are quarantined one by one; without other faults, no other batches are.
11. The result of an evaluation contains each of its batches once, weighted by records, whichever trainers measured it
    and however often. It belongs to the life of the model that asks for it.
12. A pserver that was told to end, and reports that a checkpoint has everything it had then, is right.
13. Nobody adds to a round before all blocks that wait for that member have closed the round before. So all values that
    a batch is computed from belong to one round. Exceptions: ``backup``, and programs that gave up a push.
14. A trainer that reads the result of a finished job reads everything that was trained.
15. At the end all blocks descend from the first values of one election, however often the model started over.
16. Values, slots, versions and step numbers of a block belong to one moment when it is served, saved and at the end.
17. Rows of a table that are served or saved, and ids that wait for admission, are those that follow from the updates
    and cuts of their bucket, by admission and by every rule of eviction.

Not covered: threads within a process, and bytes (streams, files). Those have tests of their own.

``python -m flightedl.testing.simulation --seeds 300`` runs it.
"""

from flightedl.testing.simulation.bugs import BUGS
from flightedl.testing.simulation.cluster import Cluster, Outcome
from flightedl.testing.simulation.runs import Found, Summary, run_seed, run_seeds
from flightedl.testing.simulation.world import Violation

__all__ = ["BUGS", "Cluster", "Found", "Outcome", "Summary", "Violation", "run_seed", "run_seeds"]
