"""State that processes share through etcd: the key layout, keys held with a lease, addresses of processes.

``keys`` names the keys, ``records`` their values, ``keeper`` holds a key for as long as this process may act under it,
``lives`` lets revisions rise on when etcd has gone back, ``directory`` follows the others. ``process`` is what master
and pserver processes have in common, ``checkpoint_places`` says where the checkpoints of a job lie.
"""
