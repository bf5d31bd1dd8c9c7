"""State that processes share through etcd: the layout of the keys, leased keys, and addresses of processes.

* ``keys``, ``records``: layout of the keys; values of keys that identify processes
* ``coordinators``: choice of the coordinator by its address
* ``flight_coordinator``: a coordinator in the memory of one process, used by other processes over Arrow Flight
* ``keeper``: a key that this process holds by a lease
* ``directory``: a copy of the job's keys that follows changes in etcd
* ``presence``: streams by which the master notices at once that this process has died
* ``lives``: revisions that keep increasing even if etcd is rolled back
* ``process``: the common part of master and pserver processes
* ``checkpoint_places``: storage for a job's checkpoints and for exported models

The path of a pserver's address: the pserver process claims ``ps/<index>`` with ``keeper``. The key's create_revision
becomes its generation, and ``process`` writes its address to the key. Every other process sees the key in its
``directory`` and connects. When the lease ends, etcd removes the key, the directories are updated, and requests with
the old generation are rejected.
"""
