"""Recovery from losses.

* ``replay``: repeats tasks after a pserver has restarted from an older state
* ``replacements``: replaced processes, which decide if a report counts after blocks have moved
* ``audit``: compares the pservers' applied batches with the done tasks, after each epoch and before the job ends
* ``reinitialization``: initializes the model again if no checkpoint contains its values
* ``lives``: results that belong to one life of the model
* ``store_history``: detects an etcd that was restored from an older state

A pserver that restarts from a checkpoint announces its applied batches. The master reopens the tasks that the pserver
lacks, and rejects reports that name the lost process. Trainers compute these tasks again, and blocks ignore the batches
that they have already applied.
"""
