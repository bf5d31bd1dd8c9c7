"""Health of a process, whatever it serves: each module buys one thing, and says what it costs.

* ``tuning``: settings of allocator, gRPC and scheduler that make Flight fast.
* ``importing``: a quicker start, by imports without garbage collection.
* ``background``: work on a thread of its own whose end is always reported.
* ``fork_guard``: a clear error instead of a deadlock after a fork.
* ``ending``: the end of a process, without what of the interpreter threads of gRPC can stop for ever.
* ``socket_abort``: connections to a server that is gone end at once, not after minutes.
* ``free_memory``: what strangers' messages took is given back. ``startup_memory``: what only the start needed is.
* ``shared_memory``: memory that another process of the host maps, without a name that could be left.
* ``fence``: the order of what both do there.
* ``metrics_page``: figures for Prometheus, read when they are asked for.
* ``host``: what it knows of itself and its machine. ``stacks``: where its threads stand, told by itself.
* ``tracing``: spans of steps, tasks, checkpoints and recoveries, across processes.
* ``log_format``: a log for people or for programs.
* ``http_page``: the small HTTP server of all pages.
* ``health_page``: whether a server has started, is alive and ready, for the probes of a cluster.
"""
