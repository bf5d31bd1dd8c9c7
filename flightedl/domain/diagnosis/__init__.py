"""Diagnosis of a job: a pure function from observations to findings.

* ``observations``: replies of all processes, queried at about the same time
* ``findings``: a cause, the process at fault, and what to do about it
* ``examine``: all rules, and which findings hide others
* rules: ``servers`` (etcd, master, pservers, hosts), ``trainers`` (and who waits for whom), ``work`` (data, tasks,
  checkpoints), ``probes`` (storage, disks and certificates as seen from this machine)
* ``profile``: how trainers spend their time

A rule reports only problems that the observations prove. ``examine`` omits consequences of other findings.
"""
