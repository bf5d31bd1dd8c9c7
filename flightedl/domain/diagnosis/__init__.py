"""Diagnosis of a job: a pure function from observations to findings.

* ``observations``: replies of all processes, which are queried at about the same time
* ``findings``: a cause, the process at fault, and the recommended action
* ``examine``: all rules, and the findings that hide others
* rules: ``servers`` (etcd, master, pservers, hosts), ``trainers`` (including which of them waits for which), ``work``
  (data, tasks, checkpoints), ``probes`` (storage, disks and certificates as seen from this machine)
* ``profile``: how trainers spend their time

A rule reports only problems that the observations prove. ``examine`` omits findings that are consequences of others.
"""
