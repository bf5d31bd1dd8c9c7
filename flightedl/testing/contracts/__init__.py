"""One suite for each port: inherit it in a test class and provide the fixtures that it names.

``coordinator`` is that of ``ports.Coordinator``, ``storage`` that of ``ports.Storage``, ``cluster`` that of
``ports.Cluster``.
"""
