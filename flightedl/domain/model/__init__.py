"""The model: its parameters, their division into blocks, and the users' settings.

* ``parameters``: the declared parameters, which are named float arrays
* ``sharding``: how the model is divided into blocks, and which pserver owns each block
* ``row_ranges``: how a parameter's rows are divided among the servers that send them
* ``declared``: the parameters, tables and plan that follow from a declaration
* ``settings``: base class of all settings
* ``optimizers``, ``schedules``: update rules and learning rates
* ``initial``: initial values of the rows of tables

A declaration lists parameters, tables and settings. ``sharding`` divides the parameters into blocks, in the same way in
every process, and the master assigns the blocks to pservers. The arithmetic of optimizers is in ``flightedl.kernels``.
"""
