"""The outside world, one module per system. Each implements a protocol of ``ports``.

``etcd``: the coordinator. ``storage``: files and stores over fsspec. ``clock``: time.
"""
