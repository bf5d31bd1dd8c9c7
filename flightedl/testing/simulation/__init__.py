"""The whole cluster in one process, from one seed: masters, pservers, trainers, etcd, store, network and clock.

What decides is the production code of ``flightedl.domain``: the cores of masters, trainers and pservers
(``domain.master``, ``domain.trainer``, ``domain.pserver``). What is simulated is around it:

* ``world``: virtual time, processes that die and freeze, a network that loses, doubles, delays and parts;
* ``etcd``, ``store``: models of the two outside systems, with outages, unknown outcomes and rot; etcd may be restored
  from an older backup, or lose what was not synced;
* ``master`` drives the core as the master's process does (``taking_over`` until there is one, ``links`` to pservers,
  ``store_worker``); ``trainer`` is a program that reads ahead (``loop``), pushes and pulls in its own way (``body``),
  raises, swallows errors, begins again and loses its registration. ``worker`` carries out what its core asks for, with
  ``transfers``; ``first_values`` its part in the election. ``pserver`` is as the pserver's process is, with ``shard``
  for its blocks, whose values are a ``ledger``; with ``--rows`` blocks are treated as buckets, and have ``rows``;
* ``cluster``: who runs, and who is started again; ``scenario``: what a seed makes of the job and its world;
* ``account``: *what must hold*, of all that is given out, done, stored and told; ``row_account``, of rows;
* ``job``: the ledger program, some of whose data nobody can train; ``evaluating``: what it evaluates before and after;
* ``planted``: how bugs are planted in the product's source; ``planted_master``, ``planted_pserver`` and
  ``planted_trainer``: which; ``bugs``: all of them by name, and those in these models; ``strikes``: faults at random;
  ``runs``: many seeds on several processes; ``recorded``: recordings of the processes.

What must hold, besides every ``check`` of the domain:

1. *The ledger*: every batch of every epoch is in every block exactly once at the end, and never twice on the way.
2. Each task is in exactly one state at every stored revision, and no attempt is ever given to two trainers.
3. No report counts that names a past generation of a pserver, or an attempt that is not current.
4. No master that was deposed writes its state, and no pserver follows its view.
5. A manifest that is newer than the pointer names complete files; so does the one that the pointer names, always.
6. A round closes only with all its due members; a checkpoint at a round has all blocks as they were at that round.
   An update is of the batches that it names, and of nothing else, and each of them has its share in it: its records'
   in a mean, 1 in a sum, by the staleness where the mode says so. A batch that is pushed again has the share that it
   had in the sum that its trainer pushed it in first.
7. When faults end, the job ends; when it is said to be done, every pserver has everything, and no round waits. Of a job
   that was stopped every batch is in all blocks or in none, also in its last checkpoint.
8. No audit finds that something is missing which counts as done; the audit mends it, and would hide it.
9. What a trainer is told it holds or hands back, and under its present registration; an answer about one attempt takes
   away no other.
10. Batches that nobody can train are set aside one by one, and where nothing else goes wrong no others are.
11. The result of an evaluation has each of its batches once, by its records, whoever measured it and however often, and
    is of the life of the model that asks for it.
12. A pserver that was told to end, and says that a checkpoint has all that it had then, is right.
13. Nobody adds to a round before all blocks that wait for it have closed the round before, but with ``backup``, and
    unless its program gave up a push: so all that a batch is computed from is of one round.
14. Who reads the result of a job that has ended reads all that was trained.
15. At the end all blocks have grown from the first values of one election, however often the model began anew.
16. Values, slots, versions and step numbers of a block are of one moment: served, saved or at the end.
17. Wherever rows of a table are served or saved, those exist, with the updates and values, and those ids wait, with the
    pushes, that follow from the updates and cuts that their bucket has had: by admission, by every rule of eviction.

Not covered: threads within a process, and bytes (streams, files): those have tests of their own.

``python -m flightedl.testing.simulation --seeds 300`` runs it.
"""

from flightedl.testing.simulation.bugs import BUGS
from flightedl.testing.simulation.cluster import Cluster, Outcome
from flightedl.testing.simulation.runs import Found, Summary, run_seed, run_seeds
from flightedl.testing.simulation.world import Violation

__all__ = ["BUGS", "Cluster", "Found", "Outcome", "Summary", "Violation", "run_seed", "run_seeds"]
