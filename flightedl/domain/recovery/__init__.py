"""Recovery from losses.

* ``replay``: repetition of tasks after a pserver was restored from an older state
* ``audit``: comparison of the pservers' applied batches with the done tasks, after each epoch and before the job ends
* ``reinitialization``: second initialization of the model, if its values are in no checkpoint
* ``lives``: assignment of results to a life of the model
* ``store_history``: detection of an etcd that was restored from an older state

A pserver that restarts from a checkpoint announces its applied batches. The master reopens the tasks that it lacks and
rejects reports that name the lost process. Trainers compute the tasks again, and blocks that have a batch ignore it.
"""
