"""A trainer's side of a job: the session that a script gets from ``fe.connect()``, its data, and its parameters.

* ``session``: the script's interface, ``connect`` and :class:`~flightedl.client.session.Job`
* ``process``: the components of a trainer process, opened and closed in order
* ``data``, ``model``, ``tables``: the job's data, dense parameters, and embedding tables
* ``following``: a copy of the model that follows its changes, for processes that serve it
* ``own_master``: the master of a group without etcd; ``group_store``: the store that the group's launcher offers
* ``registration``: the trainer's lease in etcd
* ``participation``: membership in the view, and the current batch
* ``connections``: calls to the master and the pservers, retried while a server restarts
* ``arguments``: validation of the script's arguments
* ``waiting``: messages that tell the user the reason for a long wait
* ``probe``: measurement of the time that the training loop spends in each activity
* ``progress``: the trainer's reports to the master, to Prometheus and to files
* ``once``: names that only one trainer can claim

``domain.trainer`` makes all decisions; this package contains the threads and connections that carry them out.

One batch at a time is *current* (``CurrentBatch``). The dataset opens a batch before the user's code receives it, and
closes it when the user's code requests the next one. In between, gradients are pushed with the batch's identity.

A task is finished only when every block of every pserver has answered for each of the task's batches. So when a batch
is closed, it is sent with weight zero to all blocks that have received no gradient for it.
"""
