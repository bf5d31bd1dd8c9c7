"""The outside world, one module per system. Each implements a protocol of ``ports``.

``etcd``: the coordinator; ``etcd_access``: how it is reached; ``etcd_tokens``: by a password. ``storage``: files and
stores over fsspec; ``patience``: the same, tried again when the store fails for a moment. ``clock``: time.
``instruments``: figures for Prometheus. ``telemetry``: traces and logs for OpenTelemetry. ``kubectl``: a cluster.
``certificates``: a private authority for the members of a job; ``pem_files``: reads what it makes.
"""
