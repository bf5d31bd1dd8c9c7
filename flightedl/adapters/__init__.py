"""Adapters to the outside world, one module per system. Most implement a protocol of ``ports``.

* ``etcd``: the coordinator, over etcd
* ``etcd_access``, ``etcd_tokens``: etcd's address and credentials; authentication by password
* ``etcd_program``: the etcd program on this machine, for launchers
* ``storage``, ``patience``: files and stores over fsspec; retries of their calls
* ``clock``: the process's clock
* ``instruments``, ``telemetry``: metrics for Prometheus; traces and logs for OpenTelemetry
* ``kubectl``: a Kubernetes cluster
* ``certificates``, ``pem_files``: a private certificate authority for a job's members; the files it creates

A call through an adapter: a process calls a protocol of ``ports``, such as ``Coordinator.transact``. The adapter sends
the request with a deadline and maps the library's exceptions to those of ``errors``, which separate *failed* from
*outcome unknown*. Retries are the caller's decision; ``patience`` wraps files and storage in the common policy.
"""
