"""Diagnosis of a job: a pure function that turns observations into findings.

* ``observations``: the replies of all processes, queried at about the same time
* ``findings``: the form of a finding: its cause, the process at fault, and the recommended action
* ``examine``: applies all rules and omits findings that follow from others
* rules: ``servers`` (etcd, master, pservers, hosts), ``trainers`` (including their waits for each other), ``work``
  (data, tasks, checkpoints), ``probes`` (storage, disks and certificates, as seen from this machine)
* ``profile``: how trainers spend their time

A rule reports only problems that the observations prove. ``examine`` omits findings that are consequences of other
findings.
"""
