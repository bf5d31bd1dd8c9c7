"""The arithmetic on blocks, compiled by numba.

Pservers load it; a trainer needs ``half_precision``, and ``compiled_distinct`` if it has tables.

* ``compiled`` compiles ``rules`` (every optimizer's update as a loop) and ``blocks`` (sums, checks, 16-bit conversion).
* ``compiled_rows`` compiles ``rows`` (how rows of embedding tables lie, and are found) and ``row_updates`` (their
  updates, by ``row_rules``); ``intrinsics`` are instructions that numba has no name for.
* ``compiled_distinct`` compiles ``distinct``: each id of a batch once, and its gradients added up.
* ``ahead`` names all that these may compile, and ``python -m flightedl.kernels`` compiles it before anybody waits.
* ``subnormals`` has subnormal numbers count as zero in them.
* ``half_precision``: which dtypes have 16 bits, and how their bits are carried where NumPy does not know them.
"""
