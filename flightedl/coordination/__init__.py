"""State that processes share through etcd: the key layout, keys held with a lease, addresses of processes.

* ``keys``: the keys. ``records``: their values.
* ``keeper``: a key that this process holds, for as long as it may act under it.
* ``lives``: revisions that go on rising when etcd has gone back.
* ``directory``: a copy of the other processes' keys that follows etcd.
* ``process``: the common part of master and pserver processes.
* ``checkpoint_places``: the storage of a job's checkpoints, and of exported models.
"""
