"""State that processes share through etcd: the layout of keys, leased keys, and addresses of processes.

* ``keys``, ``records``: layout of the keys; values of those that identify processes
* ``keeper``: a key that this process holds with a lease
* ``directory``: a copy of the other processes' keys that follows etcd
* ``lives``: revisions that keep increasing even if etcd is rolled back
* ``process``: the common part of master and pserver processes
* ``checkpoint_places``: the storage of a job's checkpoints, and of exported models

A pserver's path: its process claims ``ps/<index>`` with ``keeper``; the key's create_revision becomes its generation,
and ``process`` writes its address there. Every other process sees the key in its ``directory`` and connects. When the
lease ends, etcd removes the key, the directories are updated, and requests with the old generation are rejected.
"""
