"""The model: what is trained, how it is cut, and the settings that users choose.

* ``parameters``: named float arrays, as declared. ``sharding``: blocks, and which pserver owns which.
* ``declared``: what a job's declaration says of both, and of tables.
* ``optimizers``, ``schedules`` and ``initial`` (first values of rows): settings. ``settings`` is what these, and the
  modes, have in common. The arithmetic is in ``flightedl.kernels``.
"""
