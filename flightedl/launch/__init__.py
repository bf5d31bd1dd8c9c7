"""Whole jobs on one machine: a real etcd, real server processes, trainers, and somebody who watches over them.

* ``processes``: children that cannot outlive their parent; ``orphan_reaper`` is the process that sees to it.
* ``fork_server`` is the process from which the first processes of a job are forked, ``forking`` asks it.
* ``etcd``: an etcd of the job's own. ``policy``: what to do when a process ends (pure). ``supervisor``: does it.
* ``cluster``: ``fe.local()``, the servers without trainers, for notebooks and tests. ``programs``: what its processes
  are, their settings and commands. ``naming``: who may start a job of a name. ``places``: where results and logs go.
* ``run`` with ``progress``: ``flightedl run``, servers and trainers to the end of the job; ``pictures``: what it makes
  of the values that scripts logged.
* ``trainer``: the outermost frame of a trainer process, around the user's script.
* ``lease_cleaner``: ends the leases of processes that are known to be dead.
* ``failed``: failed and skipped work in words.
* ``verdict``: whether a job whose trainers ended well has done its work.
* ``last_checkpoint``: the checkpoint that a job has left behind, in words.
* ``former``: what etcd keeps of an earlier job of the same name, and how it is forgotten.
* ``liveness``: whether a job runs whose leases are in etcd, and who may start it.
* ``status``: asks a job's master how it stands. ``doctor``: asks everybody, and says what is wrong; ``probes``: what it
  tries out itself.
* ``kubernetes``: a job on Kubernetes. ``certificates``: which ones the members of a job have.
"""
