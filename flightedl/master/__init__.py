"""The master: assigns tasks, maintains the membership, and stores the job's declaration.

``domain.master`` makes all decisions. This package passes events to it and carries out the resulting effects.

* ``main``: one master process, from waiting for the lock until its exit
* ``flight``: the master's verbs, translated into calls of ``service``
* ``service``: construction of the other components, and operations that they share
* ``state``: driver of the core, guarded by one lock
* ``durable``: group commit of the state to etcd; ``recovery``: reads a predecessor's state
* ``continuity``: check that etcd was not restored from an older state
* ``declaring``: declarations of the dataset and the model; ``evaluations``: datasets of evaluations
* ``indexing``: tasks of a declared dataset; ``growing``: files that are added to the dataset later
* ``tasks``: tickets from trainers; ``failures``: location of failed work in the data files
* ``pservers``: calls to the pservers; ``beginning``: reinitialization of a model whose values are lost
* ``moves``: transactions that move blocks
* ``checkpointing``: checkpoint files; ``resuming``: starting a job from a checkpoint; ``exporting``: writing the model
  to a file
* ``presence``: removes processes whose connections have closed
* ``reading``: where clients can read parameters and tables
* ``progress``: sums over trainers' reports; ``journal``: recent events
* ``status``: the job's status; ``history``: curves over time
* ``metrics``: metrics for Prometheus; ``page``: the job's web page

A trainer's ticket arrives in ``flight``. ``tasks`` passes it to ``state``, which applies it to the core, waits until
``durable`` has stored the result, and returns the core's answer. ``tasks`` then adds the chunks of each assigned task
from the index.

Several masters may run at the same time: one holds ``master/lock``, and the others wait for it. Every write requires
the create_revision of the writing master's lock, so a deposed master cannot write.
"""
