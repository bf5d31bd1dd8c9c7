"""The task queue: assigns the batches of each epoch to trainers.

* ``tasks``: the queue and its rules; ``state``: the queue's data and invariants; ``values``: its inputs and outputs
* ``order``: order in which an epoch's tasks are assigned, based on ``permutation`` and the epoch's seed (``seeds``)
* ``batching``: the batches of a task; ``drawing`` and ``mixture``: tasks with records of several chunks or sources
* ``pending``: assigned pieces; ``backlog``: the pieces of one trainer; ``fair_share``: maximum size of a backlog
* ``waiting``: pieces waiting to be assigned again; ``ahead``: tasks of the next epoch that trainers may read early
* ``clock``: a clock that stops while no piece can run
* ``bisection``: finds the batches that make a task fail; ``failed``: quarantined batches
* ``blame``: whether a failure convicts the piece, its trainer, the script, or nobody
* ``reopening``: repeats done tasks whose updates were lost with a pserver
* ``storage``: the documents stored in etcd

A task is assigned as one *piece*, which contains all of its batches. Tasks are assigned in the order of their positions
in the epoch. A task is *pending* until its trainer reports it, and *done* after that. When the last task is done, the
epoch ends.

If the trainer fails or dies, the piece *waits* to be assigned again. After several failures the piece is split, and
batches that fail by themselves are *quarantined*. If a pserver loses the task's updates, the task is *reopened*.
"""
