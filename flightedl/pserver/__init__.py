"""A parameter server: holds one shard of the model and runs the optimizer on it.

Map:

* ``main`` wires one process and takes an index; ``service`` is the event loop of the lifecycle in ``domain.pserver``
* ``flight`` turns verbs into calls; ``conversation`` is one trainer's stream of ``steps``, whose messages a
  ``step_stream`` carries, and the thread of ``line_loop`` serves the small steps of all lines
* ``shard``: the requests to the blocks; what they mean is decided by ``domain.pserver.blocks``
* ``stores``: the interface of the two stores: ``dense`` for parameters (``building`` makes its arrays, ``spans``
  updates many small blocks at once, ``arena`` allocates memory), and the package ``rows`` for embedding tables
* ``held``: stores, protocol and locks together; ``soundness`` finds out that they do not belong together any more
* ``copying`` copies blocks for cuts, each with a ``copier``; ``snapshots`` writes the copies to checkpoints;
  ``restoring`` loads one, for which the pservers of a machine take ``turns``
* ``changes`` wakes those who wait for a version; ``meter`` counts, and ``metrics`` are the figures for Prometheus

A gradient's way: ``conversation`` reads a message, ``wire.parts`` checks its checksum, and ``shard.push`` lets the
store of the blocks check size and finiteness. Under the lock of the span it lets the protocol decide, and the store
adds the gradient up or applies it, and runs the optimizer when the round is full. Readers that wait for a version are
woken once per message.
"""
