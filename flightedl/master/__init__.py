"""The master: hands out tasks, keeps the membership, holds the job's declaration.

Map: ``main`` wires one process; ``flight`` turns verbs into calls of ``service``, which puts the parts together and
tells them what time and leases do. ``state`` is what they share, under one lock; ``durable`` writes it to etcd before
anybody is told (group commit), ``recovery`` reads it back. ``declaring`` takes declarations (``declarations`` compares
them, ``indexing`` makes tasks of a dataset); ``tasks`` takes reports and hands out work (``dispatch`` for one dataset,
``evaluations`` for those beside it, ``failures`` says where failed work lies); ``members`` decides for whom others
wait; ``pservers`` talks to the pservers (``views`` is one thread of it, ``replay`` what they lack); ``completion``
decides when checkpoints are made and when the job may end (``checkpointing`` makes them, ``resuming`` begins from one,
``exporting`` writes the model out of one) and ``beginning`` gives the model first values again when nothing has the
old ones; ``growing`` adds files that join a dataset, ``lockstep`` is what deterministic runs need; ``progress`` adds
up what trainers report, ``status`` tells it, ``continuity`` refuses an etcd that has gone back, and ``metrics`` shows
it to Prometheus.

Any number of masters may run: one holds ``master/lock``, the others wait for it. All of a master's writes name its
lock's create_revision, so a deposed one can write nothing.
"""
