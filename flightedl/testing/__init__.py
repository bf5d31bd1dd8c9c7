"""Support for tests of this package and of its users.

A clock under control, in-memory twins of the ports, planned faults, a TCP proxy that breaks connections, and real
servers (etcd, S3) that tests may kill and freeze. ``contracts`` holds the suites that an adapter and its twin pass.
"""
