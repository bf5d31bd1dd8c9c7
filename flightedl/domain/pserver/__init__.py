"""Decisions of a pserver as pure state machines, which the real and the simulated process both run.

* ``life``: state machine of the lifecycle, from acquiring an index to the end of the process
* ``life_values``: states, events and effects of the lifecycle in ``life``
* ``blocks``: the protocol of blocks for pushes, pulls, views, first values, snapshots and moves
* ``block_values``: inputs, answers and effects of the protocol in ``blocks``
* ``search``: search for the newest checkpoint that can be loaded

A pserver acquires an index, and ``life`` waits until the model is declared. The process then allocates the blocks, and
``life`` decides how they get values: from trainers, or from the checkpoint that ``search`` finds. Once the pserver
serves, each push goes to ``blocks``, which checks the sender, marks the batch as applied, and returns the effects
(copy, accumulate, update), which the process carries out on its arrays.
"""
