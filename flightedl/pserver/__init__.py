"""Parameter server: holds one shard of the model and runs the optimizer on it.

* ``main``: a pserver process, from acquiring an index until its exit
* ``flight``: handlers of the Flight verbs
* ``steps``: a trainer's stream of steps and row lookups
* ``service``: event loop of the lifecycle in ``domain.pserver.life``
* ``turns``: limit on the number of pservers that start at the same time on a machine
* ``readers``: reads of the model as Arrow columns, and the feed of changes for followers
* ``moving``: moves of blocks to and from other pservers, and copies for standbys
* ``restoring``: loading of the newest readable checkpoint
* ``shard``: operations on blocks (push, read, copy, move), as decided by ``domain.pserver.blocks``
* ``cuts``: copies of all blocks as of one moment, for files, readers and standbys
* ``meter``, ``metrics``: counters of pushes, steps and rounds, and Prometheus metrics
* ``stores``: values of parameters and rows of embedding tables, in spans

Each of them imports only those below it.

A gradient's path: ``steps`` receives a message, and ``wire.parts`` verifies its checksum. The store checks that sizes
match and that all numbers are finite (``shard.push``). Under the span's lock, the block protocol decides whether the
block accepts the batch. The store then accumulates or applies the gradient, and runs the optimizer when the round is
complete. After each message, ``stores.changes`` wakes the clients that wait for the new version.
"""
