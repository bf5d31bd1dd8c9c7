"""Deterministic simulation of the product's own processes.

Masters, pservers and trainers run unchanged, with all their threads, in one real process and in virtual time. A seed
determines everything: the order of threads, the delays of messages, the faults. Each batch must be applied once, by the
values in closed form and by the account of the recordings.

* ``scheduler``: logical threads, virtual time, kills and freezes. ``threads``: ``threading``, ``time`` and others on it
* ``network``, ``flight``: links and their faults; in-memory Flight, which passes the tests of ``rpc`` (``rpc_tests``)
* ``etcd``, ``machine``: the product's in-memory etcd with faults; what a process asks of its machine
* ``product``: import of the product on these fakes
* ``scenario``: what a seed simulates. ``strikes``: its faults. ``programs``: what each process runs
* ``ranks``: groups of ranks: their launcher, the operations among them, and the judgement of what they have read
* ``cluster``: the processes of a job. ``files``: its checkpoint store, with faults
* ``account``, ``stored``, ``bounds``: judgement of a run, its checkpoints, and its recovery from a single fault
* ``planted``: bugs to find
* ``each_transaction``: one kill and one freeze at each transaction of etcd, in a run each
* ``timelines``: what processes log around one fault, for the documentation
* ``runs``, ``server``, ``client``: seeds in forked children of a warm process, which tests talk to

Commands::

    python -m tests.simulation --seeds 100                 # run seeds; --faults off, --with moves, --processes 2
    python -m tests.simulation --seed 7                    # print what happens
    python -m tests.simulation --seed 7 --shrink           # find few strikes with which it still fails
    python -m tests.simulation --seed 7 --only 3,7         # carry out only these strikes
    python -m tests.simulation --seed 7 --diff             # print where two runs of the seed differ

Not simulated: a group's own master, batches by number, shared memory and lines between processes of one host, TLS,
reader processes, HTTP pages, ``launch``, ``adapters/etcd.py``, and memory of the machine. Other tests cover these.
"""
