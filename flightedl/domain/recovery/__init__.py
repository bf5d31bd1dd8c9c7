"""Recovery from losses.

* ``replay``: repetition of tasks after a pserver was restored from an older state
* ``audit``: comparison of the pservers' applied batches with the done tasks, after each epoch and before the job ends
* ``reinitialization``: reinitialization of the model if its values are in no checkpoint
* ``lives``: assignment of results to a life of the model
* ``store_history``: detection of an etcd that was restored from an older state

A pserver that restarts from a checkpoint announces its applied batches. The master reopens the tasks that the pserver
lacks and rejects reports that name the lost process. Trainers compute these tasks again, and blocks ignore batches that
they have already applied.
"""
