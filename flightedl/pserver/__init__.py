"""A parameter server: holds one shard of the model and runs the optimizer on it.

Map: ``main`` wires one process and takes an index; ``flight`` turns verbs into calls, and ``steps`` is what a trainer's
step is, whose messages come and leave by a ``step_stream``; ``service`` carries what happens to the process's life,
which is ``domain.pserver``, and out what follows from it; ``shard`` is what the blocks are asked; ``held`` are the
blocks and their locks, and does what ``domain.pserver.blocks`` decides (``building`` makes them, ``spans`` updates many
small ones at once, ``incoming`` checks what is sent, ``changes`` wakes those who wait for a version, ``soundness``
finds out whether all of it still belongs together); ``arena`` is the one place that allocates their
memory. ``snapshots`` copies blocks and writes them to checkpoints; ``restoring`` loads one, for which the pservers of a
machine take ``turns``. ``meter`` counts what the blocks go through, and ``metrics`` are the figures of
its Prometheus page.

Rows of embedding tables are blocks, too: ``shard_rows`` is what they are asked, and the package ``rows`` keeps them.

A gradient's way: ``flight`` reads a message, ``wire.parts`` checks its checksum, ``shard.push`` checks name, size and
finiteness, then under the block's lock asks the protocol what to do with it, and does that: adds it up or applies it,
and runs the optimizer when its round is full. Readers that wait for a version are woken once per change.
"""
