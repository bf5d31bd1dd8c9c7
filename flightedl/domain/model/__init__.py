"""The model: its parameters, its division into blocks, and the settings that users choose.

* ``parameters``: named float arrays, as declared
* ``sharding``: blocks, and the pserver that owns each block
* ``declared``: parameters, tables and plan of a declaration
* ``settings``: base class of all settings that users give
* ``optimizers``, ``schedules``: update rules and learning rates
* ``initial``: initial values of table rows

A declaration lists parameters, tables and settings. ``sharding`` cuts the parameters into blocks, the same way in every
process, and the master assigns the blocks to pservers. The arithmetic of optimizers is in ``flightedl.kernels``.
"""
