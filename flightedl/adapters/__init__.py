"""The outside world, one module per system. Most implement a protocol of ``ports``.

* ``etcd``: the coordinator. ``etcd_access``: its address and credentials. ``etcd_tokens``: access by a password.
  ``etcd_program``: the program of this machine, for launchers.
* ``storage``: files and stores over fsspec. ``patience``: the same, with retries.
* ``clock``: time. ``instruments``: figures for Prometheus. ``telemetry``: traces and logs for OpenTelemetry.
* ``kubectl``: a Kubernetes cluster.
* ``certificates``: a private authority for the members of a job. ``pem_files``: the files that it makes.
"""
