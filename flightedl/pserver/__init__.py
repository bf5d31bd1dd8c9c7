"""Parameter server: holds one shard of the model and runs the optimizer on it.

* ``main``: wiring of a process: acquiring an index, serving, ending
* ``service``: event loop of the lifecycle in ``domain.pserver.life``
* ``turns``: limit on the number of pservers that start simultaneously on one machine
* ``flight``: handlers of the Flight verbs
* ``conversation``: a trainer's stream of steps and row lookups
* ``steps``: processing of a step, and delivery of values when their rounds close
* ``step_stream``: transport of a conversation's messages over TCP, shared memory and a Unix socket
* ``line_loop``: thread that serves small steps from all Unix sockets
* ``shard``: operations on blocks (push, read, copy, move), as decided by ``domain.pserver.blocks``
* ``held``: the stores, with their protocol and locks
* ``soundness``: detection of interrupted changes, which leave values and protocol inconsistent
* ``changes``: notification of clients that wait for a version
* ``stores``: interface of the two stores, ``dense`` for parameters and the package ``rows`` for embedding tables
* ``spans``: arrays of adjacent blocks that are updated together
* ``building``: allocation of the spans of a shard plan
* ``arena``: memory allocator for the arrays
* ``copying``: copies of blocks for cuts, each with a ``copier``
* ``snapshots``: checkpoint orders, and the thread that writes the copies to files
* ``restoring``: loading the newest readable checkpoint
* ``meter``, ``metrics``: counters of pushes, steps and rounds; figures for Prometheus

A gradient's path: ``conversation`` receives a message, and ``wire.parts`` verifies its checksum. ``shard.push`` lets
the store check that the sizes are right and all numbers are finite. Under the span's lock, the protocol decides whether
the block accepts the batch; the store then accumulates or applies the gradient, and runs the optimizer when the round
is full. Finally ``changes`` wakes the clients that wait for the new version, once per message.
"""
