"""A job on Kubernetes: which objects it is made of, and how it is submitted, watched, scaled and ended.

This package is the only source of the objects: ``flightedl submit`` applies them, the kustomize base and components in
``deploy/`` are written from it, and tests compare each overlay with it.

Pure, values in and objects out:

* ``values``: the validated settings of a job on a cluster.
* ``objects``: all objects of a job, in the order in which they are applied: trainers, masters, pservers, autoscaler.
* ``pods``: building blocks of these objects, such as a pod with one container.
* ``templates``: pod templates of users, merged into these pods.
* ``etcd_members``: an etcd of the job's own. ``one_pod``: a whole job in one pod.
* ``network``: network policies.
* ``views``: labels, and the state of a job by its objects on the cluster.

With a cluster (``ports.Cluster``):

* ``secrets``: certificates for one job. ``submitting``: brings a job to a cluster, scales it, takes it away.
* ``scaling``: the loop that looks at a job, and has trainers added and removed.
* ``watching``: waits for its end, with progress and output.
"""
