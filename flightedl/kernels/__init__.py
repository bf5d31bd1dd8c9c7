"""The arithmetic on blocks, compiled by numba.

Pservers load it; a trainer needs ``half_precision``, and ``distinct`` if it has tables.

* ``rules`` has every optimizer's update of one element. ``compiled`` compiles ``blocks`` (updates built of rules,
  sums, checks, 16-bit conversion).
* ``compiled_rows`` compiles ``rows`` (reads and pushes of embedding tables), ``row_updates`` (their updates, by
  ``row_rules``), ``row_cuts`` (for checkpoints) and ``distinct`` (each id of a trainer's batch once). ``row_records``
  says how rows lie, ``row_index`` how they are found, ``row_handles`` how one call goes through many tables;
  ``intrinsics`` are instructions that numba has no name for.
* ``ahead`` names all that these may compile, and ``python -m flightedl.kernels`` compiles it before anybody waits.
* ``subnormals`` has subnormal numbers count as zero in them.
* ``half_precision``: which dtypes have 16 bits, and how their bits are carried where NumPy does not know them.
* ``plain``: what these and the Python around them say in the same way, without numba.
"""
