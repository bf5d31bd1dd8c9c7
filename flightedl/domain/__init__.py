"""All of flightedl's decisions, as pure state machines without I/O, threads or a clock.

State machines take events and ``now``, and return effects or answers, which a thin shell (``flightedl.master``,
``pserver``, ``client``) carries out. Most of them have a ``check()`` method that asserts their invariants; tests call
it after every step. Of the other packages, the domain imports only ``errors`` and ``messages``.

Each kind of process has a core, which runs both in the real process and in the simulation:

* ``master``: tasks, members, views, checkpoints, recovery, and the end of the job
* ``pserver``: a pserver's life, from claiming an index to its end
* ``trainer``: a trainer's tasks and batches, and its membership

The cores are built from these packages, each of which imports only earlier ones:

* ``model``: parameters, blocks and shards, and the users' settings
* ``tables``: embedding tables: their declarations, the owners of their rows, and the life of a row
* ``exactly_once``: makes sure that each batch is applied once, however often and by whichever trainer it is pushed
* ``recovery``: recovery from losses
* ``checkpoint``: checkpoints, from the master's order to the restored state
* ``consistency``: when rounds close, trainers' clocks, and views of the members
* ``queue``: assigns batches to trainers
* ``moving``: moves blocks between pservers
* ``feed``: changes of the model, for clients that follow it
* ``groups``: ranks that train a model without pservers: their rounds, and the starts of their group
* ``scaling``: the number of trainers; independent of the other packages

Modules for all processes:

* ``diagnosis``: derives findings about a job from the replies of its processes
* ``data_urls``, ``topics``: URLs and patterns of data files; URLs and settings of Kafka topics
* ``splitmix64``: the function that mixes the bits of seeds, numbers and ids
* ``retries``: errors that are worth retrying, and how long to retry
* ``notices``: announcements by clouds that a machine is about to end
* ``etcd_versions``: versions of etcd that keep acknowledged writes
* ``tenure``: how long the holder of a leased key may act

A task shows how the packages work together. ``queue`` assigns it to a trainer, and ``trainer`` reads it in batches and
pushes their gradients. In each block, ``exactly_once`` and ``consistency`` decide what to apply. ``checkpoint`` saves
the result. If a pserver dies, ``recovery`` makes trainers repeat the lost tasks.
"""
