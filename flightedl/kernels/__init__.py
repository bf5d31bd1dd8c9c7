"""Arithmetic on parameter blocks and on rows of tables, compiled by numba.

* ``rules``: the update of one element, for each optimizer
* ``subnormals``: a processor mode in which subnormal numbers count as zero
* ``half_precision``: conversion of 16-bit floats without numba, where speed does not matter
* ``plain``: constants and sizes that compiled code and plain Python share
* ``ahead``: list of all kernels, to be compiled in advance by ``python -m flightedl.kernels``
* ``blocks``: loops over a block: updates, sums, checks, 16-bit conversion
* ``compiled``: machine code of the loops over blocks, cached by numba
* ``row_records``: memory layout of a table's rows
* ``row_index``: hash index from ids to records
* ``row_handles``: descriptors of many tables' arrays, passed in one call
* ``rows``: reading, admission, creation and expiry of rows
* ``row_updates``, ``row_rules``: updates of rows
* ``row_cuts``: saving rows to checkpoints, and restoring them
* ``distinct``: deduplication of the ids in a trainer's batch
* ``examples``: parsing of ``tf.train.Example``
* ``intrinsics``: processor instructions that numba lacks
* ``compiled_rows``: machine code of the loops over rows

When a pserver allocates the blocks of a parameter, it calls ``compiled.kernel_for`` to get the compiled update. For
each push, ``blocks.all_finite`` checks the gradient before anything changes, ``accumulate`` adds it to the round's sum,
and the update applies the sum in a single pass over values, gradient and slots. Trainers need only ``half_precision``,
and ``distinct`` if they use tables.
"""
