"""The master: assigns tasks, maintains the membership, and keeps the job's declaration.

``domain.master`` makes all decisions. This package passes events to it and carries out its effects.

* ``main``: one process, from waiting for the lock to the exit
* ``flight``: the verbs, as calls of ``service``
* ``service``: construction of the parts below, and their common operations
* ``state``: driver of the core, under one lock
* ``durable``: group commit of the state to etcd; ``recovery``: reading it back
* ``continuity``: check that etcd was not restored from an older state
* ``declaring``: declarations of the dataset and the model; ``evaluations``: datasets of evaluations
* ``indexing``: tasks of a declared dataset; ``growing``: files that join it later
* ``tasks``: tickets of trainers; ``failures``: location of failed work in files
* ``pservers``: calls to the pservers; ``beginning``: second initialization of a model whose values are lost
* ``checkpointing``: files of checkpoints; ``resuming``: start of a job from one; ``exporting``: the model as a file
* ``progress``: sums of the trainers' reports; ``journal``: the newest events
* ``status``: the job's status; ``groups``: status of a group; ``history``: curves over time
* ``metrics``: metrics for Prometheus; ``page``: the web page

A ticket arrives in ``flight``. ``tasks`` passes it to ``state``, which applies it to the core, waits until ``durable``
has stored the result, and returns the core's answer. ``tasks`` adds the chunks of each assigned task from the index.

Several masters may run: one holds ``master/lock``, the others wait for it. Every write of a master requires its lock's
create_revision, so a deposed master cannot write.
"""
