"""Arithmetic on blocks and on rows of tables, compiled by numba.

* ``rules``: each optimizer's update of one element.
* ``subnormals``: treating subnormal numbers as zero.
* ``half_precision``: conversion of 16-bit floats without numba, for callers that do not need speed.
* ``plain``: constants and sizes that compiled code shares with plain Python.
* ``ahead``: the list of all kernels, which ``python -m flightedl.kernels`` compiles in advance.
* ``blocks``: loops over a block: updates, sums, checks, 16-bit conversion.
* ``compiled``: machine code of these loops, which numba caches.
* ``row_records``: memory layout of a table.
* ``row_index``: hash index from ids to records.
* ``row_handles``: the arrays of many tables, passed in a single call.
* ``rows``: reads, admission, creation and expiry of rows.
* ``row_updates``, ``row_rules``: updates of rows.
* ``row_cuts``: rows written to checkpoints and restored from them.
* ``distinct``: deduplication of the ids in a trainer's batch.
* ``intrinsics``: processor instructions that numba does not offer.
* ``compiled_rows``: machine code of the loops over rows.

A pserver asks ``compiled.kernel_for`` for the update of a parameter when it allocates the parameter's blocks. For each
push, ``blocks.all_finite`` checks the gradient before anything changes, ``accumulate`` adds it to the round's sum, and
the update applies the sum in one pass over values, gradient and slots. Trainers need only ``half_precision``, and
``distinct`` if they use tables.
"""
