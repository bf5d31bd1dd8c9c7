"""Jobs on Kubernetes: their objects, and how jobs are submitted, watched, scaled and ended.

All objects come from this package: ``flightedl submit`` applies them, the kustomize base and components in ``deploy/``
are generated from it, and tests compare each overlay with its objects.

Pure modules, which take values and return objects:

* ``values``: validated settings of a job on a cluster
* ``objects``: all objects of a job (trainers, masters, pservers, autoscaler) in the order in which they are applied
* ``pods``: building blocks of the objects, such as a pod with one container
* ``templates``: merges users' pod templates into the pods of a job
* ``etcd_members``: an etcd for one job
* ``network``: network policies
* ``views``: labels, and the state of a job as its objects on the cluster show it

With a cluster (``ports.Cluster``):

* ``secrets``: certificates for one job
* ``submitting``: submits, scales and removes jobs
* ``scaling``: the loop that adds and removes trainers; ``resizing``: changes the number of pservers
* ``watching``: waits until a job has ended, and shows its progress and output

When a job is submitted, ``values`` validates its settings, ``objects`` creates its objects, and ``submitting`` applies
them. The trainers' Job owns all other objects. ``watching`` (with ``views``) follows the job; ``scaling`` resizes it.
"""
