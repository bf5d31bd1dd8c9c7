"""Support for the tests: in-memory twins, real servers, faults and references.

* ``clock``: a clock that only tests advance
* ``memory``, ``memory_instruments``, ``memory_cluster``: in-memory twins of the adapters
* ``contracts``: test suites that every adapter and its twin must pass
* ``faults``: faults at named points in the code; ``marks``: the fault paths that were reached
* ``proxy``: a TCP proxy that delays, cuts and corrupts connections
* ``processes``: child processes that tests can kill and freeze
* ``etcd_server``, ``s3_server``: real servers for tests
* ``reference_updates``: all optimizers in plain NumPy
* ``reference_table``: life cycle of a table's rows in plain Python

A test gives the code in-memory twins of the clock, etcd and storage, and plans a fault, such as the death of the
process just before a checkpoint is published. The test then checks the state that the code left behind. Because the
twins pass the same contracts as the real adapters, the result also holds for etcd and S3.
"""
