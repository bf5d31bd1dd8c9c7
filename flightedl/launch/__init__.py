"""Starts, supervises and inspects jobs, on one machine (etcd, servers, trainers as processes) or on Kubernetes.

Processes:

* ``processes``: child processes that cannot outlive their parent
* ``orphan_reaper``: the process that kills orphaned child processes
* ``fork_server``: the process that forks a job's processes; ``forking``: client of the fork server
* ``preloading``: modules that the fork server imports because the script does
* ``etcd``: an etcd for one job
* ``trainer``: entry point of a trainer process, which runs the user's script
* ``programs``: settings and commands of a job's processes; ``places``: directories and free ports
* ``group_master``: entry point of the master that rank 0 of a group starts if there is no etcd
* ``certificates``: certificates for a job's members

Jobs:

* ``cluster``: ``fe.local()``, a job's servers without trainers, for notebooks and tests
* ``run``: ``flightedl run``, from the first process to the summary; ``progress``: display; ``results``: result files
* ``policy``: what to do when a process has ended (pure); ``supervisor``: carries out these decisions
* ``scaling``: adjusts the number of pserver processes
* ``prove``: ``flightedl prove``; ``strikes``: its kills and freezes; ``proof``: its verdict
* ``failed``: describes failed work; ``verdict``: result of a job whose trainers all succeeded
* ``naming``: claims a job's name; ``liveness``: determines whether a job is running
* ``former``: state of an earlier job in etcd; ``lease_cleaner``: ends the leases of dead processes
* ``kubernetes``: a job on Kubernetes

Tools:

* ``status``: client for requests to a job's master
* ``doctor``: queries all processes; ``probes``: checks storage, disks and certificates

The life of a process: ``run`` creates a ``cluster``, whose ``supervisor`` starts each process with a starter from
``programs``. The starter asks the fork server for a child process. When that child ends, ``policy`` decides whether to
replace it, to leave its slot empty, or to give up the job. The outcome goes to ``verdict`` and into the summary.
"""
