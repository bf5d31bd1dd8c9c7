"""A trainer's model: initial values, pushes, pulls, and files with values.

* ``job_model``: the session's access to the model, from its declaration to its files
* ``trees``: conversion of nested models to arrays by name, and back
* ``election``: driver that elects the trainer whose values become the initial values
* ``parameters``: the mapping of arrays that the user reads, and whose methods push and pull
* ``step_plan``: gradients' checks and their layout in messages
* ``kept``: sums of several batches' gradients, and the rounding errors of 16-bit gradients
* ``values``: memory that holds the model's values
* ``lending``: values that are shown to the user in place instead of being stored
* ``shard_client``: requests to one pserver, and its answers
* ``step_channel``: the stream to one pserver, which stays open between steps
* ``layout``: everything that depends on the owners of blocks, replaced as a whole
* ``loading``, ``saving``: reading values from a file or checkpoint; choosing the trainer that writes a file

``model.step(gradients)`` checks the gradients and lays them out by a ``StepPlan``. ``domain.trainer.steps`` decides
what to send and what to request. A ``ShardClient`` per pserver carries this out over its ``StepChannel``; it copies
received values into ``ModelValues``, which owns the memory of the user's arrays.
"""
