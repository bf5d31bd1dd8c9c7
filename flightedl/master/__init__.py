"""The master: hands out tasks, keeps the membership, holds the job's declaration.

Everything that it decides is ``domain.master``; this package carries events in and effects out.

Map: ``main`` wires one process; ``flight`` turns verbs into calls of ``service``, which puts the parts together and
tells the core what time and leases do. ``state`` drives the core under one lock, and holds who waits for an answer;
``durable`` writes its state to etcd before anybody is told (group commit), ``recovery`` reads it back. ``declaring``
takes declarations (``declarations`` compares them, ``indexing`` makes tasks of a dataset, ``evaluations`` keeps those
of evaluations); ``tasks`` asks the core for trainers (``failures`` says where failed work lies); ``pservers`` talks to
the pservers; ``checkpointing`` writes and sweeps checkpoints (``resuming`` begins from one, ``exporting`` writes the
model out of one) and ``beginning`` lets trainers elect again when nothing has the model's values; ``growing`` adds
files that join a dataset; ``progress`` adds up what trainers report, ``status`` tells it (``groups``: of a group's
ranks), ``continuity`` refuses an etcd that has gone back, ``journal`` keeps what has happened; ``metrics`` shows
figures to Prometheus, and ``page`` the job to people (``history``: curves).

Any number of masters may run: one holds ``master/lock``, the others wait for it. All of a master's writes name its
lock's create_revision, so a deposed one can write nothing.
"""
