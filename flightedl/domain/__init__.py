"""All decisions, as pure state machines without I/O, threads or a clock.

A state machine takes events and ``now``, and returns effects or answers. A thin shell around it (``flightedl.master``,
``pserver``, ``client``) carries them out. Most have ``check()``, which asserts their invariants; tests call it after
every step. Of this project, the domain imports only ``errors`` and ``messages``.

Each kind of process has a core, which the real process and the simulated one both run:

* ``master``: tasks, members, views, checkpoints, recovery, the end of the job
* ``pserver``: a pserver's life, from claiming an index to its end
* ``trainer``: a trainer's tasks, their batches, its membership

They are built from these packages; each imports only earlier ones:

* ``model``: parameters, blocks and shards, and the settings that users choose
* ``tables``: embedding tables: declarations, owners of rows, life of a row
* ``exactly_once``: application of each batch once, regardless of who pushes it and how often
* ``recovery``: recovery from losses
* ``checkpoint``: checkpoints, from the order to the restored state
* ``consistency``: rounds, clocks and views
* ``queue``: assignment of batches to trainers
* ``moving``: moves of blocks between pservers
* ``groups``: rounds of ranks that train their own model, and starts of their group
* ``scaling``: number of trainers; independent of the others

Modules for all processes:

* ``diagnosis``: findings about a job, from the replies of its processes
* ``retries``: errors worth another attempt, and for how long
* ``tenure``: how long the holder of a leased key may act

A task shows how they work together: ``queue`` assigns it, ``trainer`` reads it in batches and pushes their gradients,
``exactly_once`` and ``consistency`` decide in each block what to apply, and ``checkpoint`` stores the result. If a
pserver dies, ``recovery`` has the lost tasks repeated.
"""
