"""Simulation of a whole cluster in one process, from one seed: processes, etcd, the store, the network and time.

All decisions are made by production code: the cores of masters, trainers and pservers in ``flightedl.domain``. The
modules of this package simulate everything around these cores:

* ``world``: virtual time, processes that die and freeze, a network that loses, duplicates, delays and blocks messages
* ``etcd``, ``store``: models of the two external systems, with outages, unknown outcomes and damaged files
* ``master``: driver of the master's core, with ``taking_over``, ``links`` to the pservers and ``store_worker``
* ``pserver``: driver of the pserver's core, with ``shard`` (its blocks), ``ledger`` (their values), ``rows``,
  ``moving`` (the moves of blocks between pservers), and ``standby`` (the copies of blocks for standbys)
* ``trainer``: driver of a trainer's cores, with ``loop``, ``body``, ``worker``, ``transfers``, ``first_values`` and
  ``evaluating``
* ``job``: the ledger program, whose data includes some that no trainer can process
* ``scenario``: the job, the programs, and the rates of faults that follow from a seed
* ``cluster``: all processes, and the supervisor that restarts them
* ``strikes``: random faults
* ``account``, ``row_account``: check the invariants against everything that was assigned, done, stored and reported
* ``runs``: runs many seeds in several processes
* ``recorded``: records the simulated processes

The invariants, besides those asserted by each ``check`` in the domain, are:

* *The ledger*: at the end, every block contains every batch of every epoch exactly once; it never contains one twice.
* At every stored revision, each task is in exactly one state. No attempt is assigned to two trainers.
* A report does not count if it names an old generation of a pserver, or an outdated attempt.
* A deposed master does not write its state, and no pserver adopts its view.
* The checkpoint that the pointer names is complete, and so is every newer one with a manifest.
* A round closes only when all expected members have contributed. A checkpoint has all blocks as of its round.
* An update contains exactly the batches that it names, each with its share: 1 in a sum, or the fraction of its records
  in a mean, scaled by staleness if the mode requires it. A batch that is pushed again keeps the share that it had in
  its trainer's first sum.
* Once faults have stopped, the job ends. When the master reports the job as done, every pserver has applied everything,
  and no round waits. After a stop, every batch is in all blocks or in none, even in its last checkpoint.
* No audit finds that a task counted as done is missing. The audit would repeat the task and thus hide the bug.
* A trainer holds or returns every task that it is assigned under its current registration. An answer about one attempt
  does not revoke another.
* Batches that no trainer can process are quarantined one by one. No other batches are, if nothing else fails.
* An evaluation's result contains each batch once, weighted by records, and belongs to the requested life of the model.
* A draining pserver's report that a checkpoint contains everything it had when asked to exit is always true.
* No member adds to a round before all blocks that wait for it have closed the previous round, so all values from which
  a batch is computed belong to one round. Exceptions: mode ``backup``, and programs that have given up on a push.
* A trainer that reads the result of a finished job reads everything that was trained.
* Only the owner of a block in etcd updates the block, and adopts it with everything that the former owner has applied.
* While a standby is alive, no other process claims the index of its pserver. It serves a copy only if the process that
  it copied was the last one to hold the index.
* At the end, all blocks descend from the initial values of one election, however often the model started over.
* Whenever a block is served or saved, and at the end, its values, slots, version and step number belong to one moment.
* The table rows and waiting ids that are served or saved follow from their bucket's updates and cuts, under the rules
  of admission and eviction.

Not covered: threads within a process, and bytes (streams, files). Other tests cover these.

``python -m tests.simulation.cores --seeds 300`` runs it. With ``--moves``, the number of pservers changes, and
pservers are drained, from time to time. With ``--standbys``, processes without an index are standbys, and pservers die
more often; with both options, the master also moves blocks away from busy pservers.
"""

from tests.simulation.bugs import BUGS
from tests.simulation.cores.cluster import Cluster, Outcome
from tests.simulation.cores.runs import Found, Summary, run_seed, run_seeds
from tests.simulation.cores.world import Violation

__all__ = ["BUGS", "Cluster", "Found", "Outcome", "Summary", "Violation", "run_seed", "run_seeds"]
