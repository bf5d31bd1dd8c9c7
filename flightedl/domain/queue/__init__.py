"""The task queue: assigns the batches of each epoch to trainers.

* ``tasks``: the queue and its rules; ``state``: its data, queries and invariants; ``values``: its inputs and outputs
* ``order``: dispatch order of an epoch; ``permutation``: the keyed permutation behind it; ``seeds``: each epoch's seed
* ``batching``: batches of a task; ``mixture``: tasks that mix records of several sources
* ``pending``: assigned pieces; ``backlog``: the pieces of one trainer; ``fair_share``: limit on the length of a backlog
* ``waiting``: pieces waiting to be assigned again; ``ahead``: next-epoch tasks that trainers may read early
* ``clock``: clock that stops while no piece can run
* ``bisection``: search for the batches that make a task fail; ``failed``: quarantined batches
* ``reopening``: repetition of done tasks whose updates were lost with a pserver
* ``storage``: the documents stored in etcd

A task is assigned as one *piece*, which contains all its batches. Tasks are assigned in the order of the epoch's
positions. A task is *pending* until its trainer reports it, and *done* after that. The epoch ends when its last task is
done. If the trainer fails or dies, the piece *waits* and is assigned again; after several failures it is split, and
batches that fail alone are *quarantined*. If a pserver loses the task's updates, the task is *reopened*.
"""
