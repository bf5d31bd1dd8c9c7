"""A trainer's model: initial values, pushes, pulls, and files with values.

* ``job_model``: the session's access to the model, from its declaration to its files
* ``trees``: conversion of nested models to arrays by name, and back
* ``election``: driver of the election of the trainer that provides the initial values
* ``parameters``: the mapping of arrays that the user reads, pushes to and pulls
* ``step_plan``: checks of gradients, and their layout in messages
* ``kept``: sums of several batches' gradients, and rounding errors of 16-bit gradients
* ``values``: memory of the model's values
* ``lending``: values that are shown to the user instead of being stored
* ``shard_client``: requests and answers of one pserver
* ``step_channel``: the stream to one pserver, kept open from step to step
* ``layout``: everything that depends on the owners of blocks, replaced as a whole
* ``loading``, ``saving``: reading values from a file or checkpoint; writing them in one trainer

``model.step(gradients)`` checks the gradients and lays them out by a ``StepPlan``. ``domain.trainer.steps`` decides
what to send and what to request. A ``ShardClient`` per pserver carries this out over its ``StepChannel``; it copies
received values into ``ModelValues``, where the user's arrays are.
"""
