"""Support for tests of this package and of its users.

``clock``: one that moves only when a test says so. ``memory``, ``memory_coordinator``, ``memory_instruments`` and
``memory_cluster``: in-memory twins of the ports. ``faults``: planned at named points. ``proxy``: breaks connections as
networks do. ``processes``, ``etcd_server`` and ``s3_server``: real servers that tests may kill and freeze.
``contracts``: the suites that an adapter and its twin pass. ``reference_updates``: every optimizer in plain NumPy;
``reference_table``: the life of a table's rows in plain Python. ``simulation``: the whole cluster in one process, from
one seed.
"""
