"""Whole jobs on one machine: a real etcd, real server processes, trainers, and a supervisor; and jobs on Kubernetes.

* ``processes``: children that cannot outlive their parent. ``orphan_reaper``: the process that kills the last of them.
* ``fork_server``: the process from which the processes of a job are forked. ``forking``: the launcher's side of it.
* ``etcd``: an etcd of the job's own.
* ``policy``: decisions about processes that end (pure). ``supervisor``: carries them out.
* ``cluster``: ``fe.local()``, servers without trainers, for notebooks and tests. ``programs``: settings and commands
  of its processes. ``places``: directories of results and logs, and free ports.
* ``naming``: the claim of a job's name. ``liveness``: proofs that a job of a name runs. ``former``: the state that etcd
  keeps of an earlier job, and how it is forgotten. ``lease_cleaner``: ends the leases of dead processes.
* ``run``: ``flightedl run``, servers and trainers to the end of the job. ``progress``: its display. ``results``: its
  curves and its last checkpoint.
* ``trainer``: the outermost frame of a trainer process, around the user's script.
* ``failed``: failed and skipped work in words. ``verdict``: the end of a job whose trainers ended well.
* ``status``: requests to a job's master. ``doctor``: requests to all processes. ``probes``: its probes of storage, disk
  and certificates.
* ``kubernetes``: a job on Kubernetes. ``certificates``: the certificates of a job's members.
"""
