"""A trainer's side of a job: the session that a script gets from ``fe.connect()``, its data and its parameters.

* ``session``: the script's interface, ``connect`` and :class:`~flightedl.client.session.Job`
* ``process``: the parts of a trainer process, opened and closed in order
* ``data``, ``model``, ``tables``: the job's data, dense parameters, and embedding tables
* ``registration``: the trainer's lease in etcd
* ``participation``: membership in the view, and the current batch
* ``connections``: calls to master and pservers, retried when these restart
* ``arguments``: validation of the script's arguments
* ``waiting``: messages to the user about long waits
* ``probe``: the time that the loop spends in each activity
* ``progress``: reports to the master, to Prometheus, and to files
* ``once``: names that only one trainer can claim

All decisions are made in ``domain.trainer``; this package contains the threads and connections around them.

One batch at a time is *current* (``CurrentBatch``). The dataset opens it before the user's code receives it, gradients
are pushed under its identity, and the dataset closes it when the next batch is requested. Closing a batch delivers it,
with weight zero, to every block to which it was not pushed, because a task is finished only when every block of every
pserver has answered for each of its batches.
"""
