"""Embedding tables: rows of numbers by 64-bit id, which are created when they are first trained.

* ``spec``: declaration of a table
* ``optimizers``: optimizers of rows
* ``evict``: rules for the eviction of rows
* ``placement``: mapping of ids to buckets, and of buckets to pservers
* ``restoring``: rules for restoring rows from the files of checkpoints

A row's path: ``placement`` maps its id to a bucket, whose pserver creates the row at the first push that ``spec``
admits, with initial values from ``domain.model.initial``. Each push of the id runs the table's optimizer on the row,
until a rule of ``evict`` removes it. ``testing.reference_table`` specifies all of this; the simulation runs it, and the
kernels are tested against it.
"""
