"""Parameter server: holds one shard of the model and runs the optimizer on it.

* ``main``: a pserver process, from acquiring an index until its exit
* ``service``: event loop of the lifecycle in ``domain.pserver.life``
* ``turns``: limit on the number of pservers that start at the same time on a machine
* ``flight``: handlers of the Flight verbs
* ``conversation``: a trainer's stream of steps and row lookups
* ``steps``: processing of a step, and delivery of values when their rounds close
* ``step_stream``: transport of a conversation's messages on TCP, shared memory and a Unix socket
* ``line_loop``: the thread that serves small steps on all Unix sockets
* ``shard``: operations on blocks (push, read, copy, move), as decided by ``domain.pserver.blocks``
* ``held``: the shard's stores, with their block protocol and locks
* ``soundness``: detection of interrupted changes, after which values and protocol state are inconsistent
* ``changes``: wakes clients that wait for a version
* ``stores``: values exchanged with the two stores: ``dense`` for parameters, the package ``rows`` for embedding tables
* ``spans``: arrays of adjacent blocks that are updated in one kernel call
* ``building``: allocation of the spans of a shard plan
* ``arena``: memory allocator for the blocks' arrays
* ``copying``: copies of blocks for every cut in progress; ``copier``: copies for a single cut
* ``snapshots``: checkpoint orders, and the thread that writes the copies to files
* ``moving``: moves of blocks to and from other pservers, and copies for standbys
* ``restoring``: loading of the newest readable checkpoint
* ``reading``: reads of parameters and tables as Arrow columns; ``kept``: cuts
* ``feed``: changes for followers; ``consumers``: what named followers acknowledge
* ``meter``, ``metrics``: counters of pushes, steps and rounds, and Prometheus metrics

A gradient's path: ``conversation`` receives a message, and ``wire.parts`` verifies its checksum. The store checks that
sizes match and that all numbers are finite (``shard.push``). Under the span's lock, the block protocol decides whether
the block accepts the batch. The store then accumulates or applies the gradient, and runs the optimizer when the round
is complete. After each message, ``changes`` wakes the clients that wait for the new version.
"""
