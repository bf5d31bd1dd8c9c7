"""A trainer's model: first values, pushes, pulls, and files with values.

* ``job_model`` is what a session has of it, from its declaration to files of it.
* ``trees`` takes nested models apart, by name, and puts them together again.
* ``election`` chooses whose first values it gets.
* ``parameters`` is what the user calls: ``step_plan`` checks gradients and lays them out as they travel,
  ``kept`` adds up the gradients of several batches and keeps what 16 bits round off, ``values`` is where the model
  lies, unless it is lent (``lending``). What a call sends and asks for is decided in
  ``domain.trainer.steps``, and carried out with a ``shard_client`` for each pserver, over a ``step_channel``.
  Everything that depends on the owners of blocks lies in a ``layout``, which is swapped as a whole.
* ``loading`` reads values from a file or a checkpoint; ``saving`` has one trainer write them.
"""
