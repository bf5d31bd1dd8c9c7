"""Contract suites, one for each port. A test class inherits from a suite and provides the fixtures that the suite uses.

* ``coordinator``: suites for ``ports.Coordinator``
* ``storage``: suite for ``ports.Storage``
* ``cluster``: suite for ``ports.Cluster``

To verify a new adapter of ``ports.Storage``, inherit ``StorageContract``, and let a fixture ``storage`` return it.
"""
