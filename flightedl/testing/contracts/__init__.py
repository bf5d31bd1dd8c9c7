"""Contract suites, one for each port. A test class inherits a suite and provides the fixtures that the suite names.

* ``coordinator``: suites for ``ports.Coordinator``
* ``storage``: suite for ``ports.Storage``
* ``cluster``: suite for ``ports.Cluster``

The in-memory twin and the adapter of a port inherit the same suite. A new adapter of ``ports.Storage`` is correct if a
class that inherits ``StorageContract`` and returns the adapter from its fixture ``storage`` passes.
"""
