"""Deterministic simulation of the product's own processes.

Masters, pservers and trainers run unchanged, with all their threads, in one real process and in virtual time. A seed
determines everything: the order of threads, the delays of messages, the faults.

* ``scheduler``: logical threads, virtual time, kills and freezes. ``threads``: ``threading``, ``time`` and others on it
* ``network``, ``flight``: links and their faults; in-memory Flight, which passes the tests of ``rpc`` (``rpc_tests``)
* ``etcd``, ``machine``: the product's in-memory etcd with faults; what a process asks of its machine
* ``product``: import of the product on these fakes
* ``scenario``: what a seed simulates. ``strikes``: its faults. ``programs``: what each process runs
* ``ranks``: groups of ranks: their launcher, the operations among them, and the judgement of what they have read
* ``cluster``: the processes of a job. ``files``: its checkpoint store, with faults
* ``account``, ``stored``, ``bounds``: judgement of a run, its checkpoints, and its recovery from a single fault
* ``bugs``: bugs to find. ``calls``: plants them, and aims strikes at calls. ``found_bugs``: the seeds that find them
* ``reached``: seeds that reach the product's marks. ``covered``: statements of drivers that seeds execute
* ``each_transaction``: one kill and one freeze at each transaction of etcd, in a run each
* ``timelines``: what processes log around one fault, for the documentation
* ``runs``, ``server``, ``client``: seeds in forked children of a warm process, which tests talk to

What is judged at the end of a run:

* Each batch is applied once: by the values of all parameters, optimizer slots and rows in closed form, and by the
  account of the recordings. Batches that no trainer can process are quarantined, and no others if nothing else fails.
* Each complete file of a checkpoint has what its applied batches make, also if it was deleted since. The checkpoint
  that etcd names can be loaded, and the last one has the final values, as have followers, exports and saved models.
* Each recorded core decides the same when it is replayed, and its invariants (``check``) hold after each event.
* Only the master that has the lock writes the job's state, and no process takes an index whose standby is alive.
* No audit repeats work that counted as done, which would hide a bug.
* Each process ends with the right code, and says why in one sentence. No thread dies of an error, or is left. Once
  faults have ended, the job ends. After a single fault, it recovers in time.
* Groups of ranks: each record once an epoch, in equal global batches; see ``ranks``.

Commands::

    python -m tests.simulation --seeds 100                 # run seeds; --faults off, --with moves, --processes 2
    python -m tests.simulation --seed 7                    # print what happens
    python -m tests.simulation --seed 7 --shrink           # find few strikes with which it still fails
    python -m tests.simulation --seed 7 --only 3,7         # carry out only these strikes
    python -m tests.simulation --seed 7 --diff             # print where two runs of the seed differ

Not simulated: a group's own master, batches by number, shared memory and lines between processes of one host, TLS,
reader processes, HTTP pages, ``launch``, ``adapters/etcd.py``. Other tests cover these.
"""
