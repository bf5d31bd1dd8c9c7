"""Embedding tables: rows of numbers identified by 64-bit ids, and created when they are first trained on.

* ``spec``: declaration of a table
* ``optimizers``: optimizers of rows
* ``evict``: rules for removing rows
* ``placement``: which bucket an id belongs to, and which pserver owns a bucket
* ``restoring``: rules for restoring rows from checkpoint files

The life of a row: ``placement`` maps its id to a bucket. The bucket's pserver creates the row at the first push that
``spec`` admits, with initial values from ``domain.model.initial``. Each push of the id runs the table's optimizer on
the row, until a rule of ``evict`` removes the row.

``testing.reference_table`` specifies all of this; the simulation runs that code, and the kernels are tested against it.
"""
