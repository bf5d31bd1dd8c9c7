"""A job on Kubernetes: its objects, and how it is submitted, watched, scaled and ended.

This package is the only source of the objects: ``flightedl submit`` applies them, the kustomize base and components in
``deploy/`` are generated from it, and tests compare each overlay with it.

Pure, values in and objects out:

* ``values``: validated settings of a job on a cluster
* ``objects``: all objects of a job, in the order in which they are applied: trainers, masters, pservers, autoscaler
* ``pods``: building blocks of these objects, such as a pod with one container
* ``templates``: users' pod templates, merged into these pods
* ``etcd_members``, ``one_pod``: an etcd for one job; a complete job in one pod
* ``network``: network policies
* ``views``: labels, and the state of a job according to its objects on the cluster

With a cluster (``ports.Cluster``):

* ``secrets``: certificates for one job
* ``submitting``: submitting, scaling and removing a job
* ``scaling``: the loop that adds and removes trainers
* ``watching``: waits for the end of a job, with progress and output

A submitted job: ``values`` validates its settings, ``objects`` creates its objects, ``submitting`` applies them. The
trainers' Job owns all others. ``watching`` follows the job using ``views``, and ``scaling`` changes its parallelism.
"""
