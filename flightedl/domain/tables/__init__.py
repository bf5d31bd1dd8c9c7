"""Embedding tables: rows of numbers by 64-bit id, which come into being as they are trained.

* ``spec`` is what is declared of a table: ``optimizers`` and ``evict`` are settings of it.
* ``placement``: how an id is mixed, which bucket it lies in, and which pserver has that.
* ``restoring`` is what follows from what a checkpoint's files say of tables.

Optimizers that tables share with the dense model, and the first values of rows, are in ``domain.model``. How
rows come into being, are updated and expire is written down in ``testing.reference_table``: the simulation uses that,
and the kernels are tested against it.
"""
