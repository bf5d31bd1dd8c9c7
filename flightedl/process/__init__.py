"""Health of a process, independent of its role. Each module documents its benefit and its cost.

* ``tuning``: settings of allocator, gRPC and scheduler that make Flight fast.
* ``importing``: a quicker start, by imports without garbage collection.
* ``background``: work on a thread of its own whose end is always reported.
* ``fork_guard``: a clear error instead of a deadlock after a fork.
* ``ending``: the end of a process, without the interpreter's steps that threads of gRPC can block for ever.
* ``socket_abort``: an immediate end of connections to a dead server.
* ``free_memory``: memory of strangers' messages, given back. ``startup_memory``: memory of the start, given back.
* ``shared_memory``: memory that another process of the host maps, without a name that could be left.
* ``fence``: the order of both processes' accesses to it.
* ``host``: facts about the process and its machine. ``stacks``: stacks of its threads.
* ``tracing``: spans of steps, tasks, checkpoints and recoveries, across processes.
* ``log_format``: a log for people or for programs.
* ``http_page``: the small HTTP server of all pages. ``metrics_page``: figures for Prometheus. ``health_page``: answers
  to the probes of a cluster.
"""
