"""A job on Kubernetes: its objects, and how it is submitted, watched, scaled and ended.

This package is the only source of the objects: ``flightedl submit`` applies them, the kustomize base and components in
``deploy/`` are written from it, and tests compare each overlay with it.

Pure, values in and objects out:

* ``values``: the validated settings of a job on a cluster.
* ``pods``: building blocks of these objects, such as a pod with one container.
* ``pods``: building blocks of these objects, such as a pod with one container.
* ``etcd_members``: an etcd for one job. ``one_pod``: a complete job in one pod.
* ``etcd_members``: an etcd of the job's own. ``one_pod``: a whole job in one pod.
* ``views``: labels, and the state of a job according to its objects on the cluster.
* ``views``: labels, and the state of a job by its objects on the cluster.

With a cluster (``ports.Cluster``):

* ``secrets``: certificates for one job. ``submitting``: submits, scales and removes a job.
* ``scaling``: the loop that adds and removes trainers.
* ``watching``: waits for the end of a job, with progress and output.
"""
