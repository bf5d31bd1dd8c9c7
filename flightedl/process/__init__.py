"""Support for processes of any role. Each module states its benefit and its cost.

* ``tuning``: settings of the allocator, gRPC and the scheduler that make Flight fast
* ``importing``: faster startup, by importing without garbage collection; errors for missing optional packages
* ``background``: work on a separate thread, whose end is always reported
* ``fork_guard``: an error, instead of a deadlock, when Flight is used after a fork
* ``ending``: exit without the interpreter's final steps, in which gRPC's threads can block forever
* ``machine``: everything that a process asks of its machine; a simulation replaces this module
* ``socket_abort``: immediate end of connections to a frozen peer
* ``free_memory``, ``startup_memory``: return of memory to the system after large messages and after startup
* ``shared_memory``, ``fence``: unnamed memory that two processes on a host map, and the order of their accesses
* ``host``, ``stacks``: properties of the process and its machine; stack traces of its threads
* ``tracing``: spans of steps, tasks, checkpoints and recoveries across processes
* ``log_format``: logs for humans and for programs
* ``http_page``: a small HTTP server, used by all pages
* ``metrics_page``, ``health_page``: metrics for Prometheus; answers to the probes of a cluster

A server process first runs ``importing`` and ``tuning``. While it binds its port, ``health_page`` answers "not
started". ``tracing`` and ``metrics_page`` then observe its requests, ``free_memory`` trims its heap, and finally
``ending`` ends the process.
"""
