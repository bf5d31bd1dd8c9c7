"""A job on Kubernetes: which objects it is made of, and how it is submitted, watched, scaled and ended.

What is written here is the only source of the objects: ``flightedl submit`` applies what is rendered, the kustomize
base and components in ``deploy/`` are written from it, and tests compare each overlay with it.

Pure, values in and objects out:

* ``values``: what a job is told. ``objects``: all objects of a job, in the order in which they are applied.
* ``pods``: what all pods have in common. ``servers``: masters and pservers. ``trainers``: the Job of the trainers.
* ``templates``: pod templates of users, merged into these pods.
* ``etcd_members``: an etcd of the job's own. ``network``: who may reach whom. ``places``: stores outside of the job.
* ``autoscaler``: the loop that adds trainers. ``one_pod``: a whole job in one pod.
* ``views``: what a cluster's objects say of a job.

With a cluster (``ports.Cluster``):

* ``secrets``: certificates for one job. ``submitting``: brings a job to a cluster, scales it, takes it away.
* ``scaling``: the loop that looks at a job, and has trainers added and removed.
* ``watching``: waits for its end, with progress and output.
"""
