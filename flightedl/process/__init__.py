"""Support for processes of any role. Each module documents its benefit and its cost.

* ``tuning``: settings of allocator, gRPC and scheduler that make Flight fast
* ``importing``: faster startup through imports without garbage collection; missing optional packages
* ``background``: work on a separate thread whose end is always reported
* ``fork_guard``: a clear error instead of a deadlock after a fork
* ``ending``: ending a process without the interpreter's steps that gRPC's threads can block forever
* ``socket_abort``: immediate end of connections to a dead server
* ``free_memory``, ``startup_memory``: returning memory to the system after large messages and after startup
* ``shared_memory``, ``fence``: unnamed memory mapped by two processes of a host; the order of their accesses
* ``host``, ``stacks``: facts about the process and its machine; stacks of its threads
* ``tracing``: spans of steps, tasks, checkpoints and recoveries, across processes
* ``log_format``: human-readable and machine-readable logs
* ``http_page``: the small HTTP server of all pages
* ``metrics_page``, ``health_page``: metrics for Prometheus; answers to a cluster's probes

A server's life: ``importing`` and ``tuning`` run first, ``health_page`` answers "not started" while the server binds,
``tracing`` and ``metrics_page`` observe its requests, ``free_memory`` trims its heap, and ``ending`` ends the process.
"""
