"""A pserver's decisions, as pure state machines that run in the pserver process and in the simulation.

* ``life``: state machine of the lifecycle, from acquiring an index to exiting
* ``life_values``: states, events and effects of ``life``
* ``blocks``: the protocol of blocks: pushes, pulls, views, first values, snapshots and moves
* ``block_values``: inputs, answers and effects of ``blocks``
* ``search``: finds the newest checkpoint that can be loaded

A pserver acquires an index, and ``life`` waits until the model is declared. The process then allocates the blocks.
``life`` decides whether they get their values from trainers or from the checkpoint that ``search`` finds.

Once the pserver is serving, ``blocks`` handles each push: it checks the sender, marks the batch as applied, and returns
the effects (copy, accumulate, update), which the process carries out on its arrays.
"""
