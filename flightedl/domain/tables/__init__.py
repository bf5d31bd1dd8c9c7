"""Embedding tables: rows of numbers by 64-bit id, which come into being as they are trained.

* ``spec`` is what is declared of a table: ``optimizers`` and ``evict`` are settings of it.
* ``placement``: how an id is mixed, which bucket it lies in, and which pserver has that.
* ``rules`` are the optimizers' formulas for one row, and ``reference`` is what becomes of rows: created, admitted,
  updated, read, expired. Plain Python: the simulation uses them, and the kernels are tested against them.
* ``restoring`` is what follows from what a checkpoint's files say of tables.

Optimizers that tables share with the dense model, and the first values of rows, are in ``domain.model``.
"""
