"""Adapters to external systems, one module per system. Most of them implement a protocol of ``ports``.

* ``etcd``, ``memory``: the coordinator, implemented with etcd, and in memory
* ``etcd_access``, ``etcd_tokens``: address and credentials of etcd; authentication by password
* ``etcd_program``: the etcd program on this machine, for launchers
* ``storage``, ``listing``, ``patience``: files and storage on fsspec; the files that patterns match; retries of calls
* ``kafka``: Kafka topics as files
* ``clock``: the process's clock
* ``instruments``, ``telemetry``: metrics for Prometheus; traces and logs for OpenTelemetry
* ``kubectl``: a Kubernetes cluster
* ``notices``: a thread that watches for notices about the end of this machine
* ``certificates``, ``pem_files``: a private certificate authority for a job's members; the files that it creates

To access an external system, a process calls a method of a protocol in ``ports``, such as ``Coordinator.transact``. The
adapter sends the request with a deadline, and converts the library's exceptions to those in ``errors``, which
distinguish *failed* from *outcome unknown*. The caller decides whether to retry; for files and storage, ``patience``
implements the common policy.
"""
