"""Jobs on one machine (etcd, servers, trainers and a supervisor as processes), jobs on Kubernetes, and tools.

Processes:

* ``processes``: children that cannot outlive their parent
* ``orphan_reaper``: the process that kills orphaned children
* ``fork_server``, ``forking``: the process from which a job's processes are forked, and its client
* ``etcd``: an etcd for one job
* ``trainer``: entry point of a trainer process, which runs the user's script
* ``programs``, ``places``: settings and commands of a job's processes; directories and free ports
* ``certificates``: the certificates of a job's members

Jobs:

* ``cluster``: ``fe.local()``, servers without trainers, for notebooks and tests
* ``run``: ``flightedl run``, from the first process to the summary; ``progress`` is its display, ``results`` its output
* ``policy``, ``supervisor``: decisions about ended processes (pure), and their execution
* ``prove``: ``flightedl prove``; ``strikes``: its kills and freezes; ``proof``: its verdict
* ``failed``, ``verdict``: description of failed work; the result of a job whose trainers succeeded
* ``naming``, ``liveness``: claim of a job's name, and proof that a job is running
* ``former``, ``lease_cleaner``: state of an earlier job in etcd, and removal of dead processes' leases
* ``kubernetes``: a job on Kubernetes

Tools:

* ``status``: requests to a job's master
* ``doctor``, ``probes``: requests to all processes; probes of storage, disk and certificates

A process from start to end: ``run`` creates a ``cluster``, whose ``supervisor`` starts each process with a starter from
``programs``. The starter asks the fork server for a child. When the child ends, ``policy`` decides whether to start
another process, leave the slot empty, or give up. The outcome goes to ``verdict`` and the summary.
"""
