"""A trainer's model: initial values, pushes, pulls, and files with values.

* ``job_model``: the session's access to the model, from its declaration to its files
* ``trees``: conversion between nested models and named arrays
* ``election``: election of the trainer whose values become the model's initial values
* ``parameters``: the mapping of arrays that users read, with its methods for pushing and pulling
* ``step_plan``: validation of gradients, and their layout in messages
* ``kept``: gradients accumulated over several batches, and rounding errors of 16-bit gradients
* ``values``: memory that holds the model's values
* ``lending``: values that users read in place, without a copy in this process
* ``shard_client``: requests to one pserver, and its responses
* ``step_channel``: the stream to one pserver, which stays open between steps
* ``layout``: everything that depends on the owners of blocks; replaced as a whole
* ``loading``, ``saving``: reading values from a file or checkpoint; choosing which trainer writes a file

``model.step(gradients)`` checks the gradients and lays them out according to a ``StepPlan``. ``domain.trainer.steps``
decides what to send and what to request. For each pserver, a ``ShardClient`` carries out these decisions on its
``StepChannel`` and copies the received values into ``ModelValues``, which owns the memory of the user's arrays.
"""
