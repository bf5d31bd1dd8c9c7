"""Support for testing this package and programs that use it.

* ``clock``: clock that only tests advance
* ``memory``, ``memory_coordinator``, ``memory_instruments``, ``memory_cluster``: in-memory twins of the ports
* ``contracts``: test suites that every adapter and its twin must pass
* ``faults``: faults at named points
* ``proxy``: TCP proxy that delays, cuts and corrupts connections
* ``processes``: child processes that tests kill and freeze
* ``etcd_server``, ``s3_server``: real servers for tests
* ``reference_updates``: every optimizer in plain NumPy
* ``reference_table``: life cycle of a table's rows in plain Python
* ``simulation``: a cluster in one process, determined by one seed

A test replaces the clock, etcd and storage of the code under test with their twins, and plans a fault, such as the
death of the process just before a checkpoint is published. It then checks the state that the code left behind. Because
the twins pass the same contracts as the real adapters, the result also holds with etcd and S3.
"""
