"""The master: hands out tasks, keeps the membership, holds the job's declaration.

Map: ``main`` wires one process; ``flight`` turns verbs into calls of ``service``, which is all decisions under one
lock; ``durable`` writes the service's state to etcd before anybody is told (group commit); ``views`` carries the
membership to the pservers; ``declarations`` compares what trainers declare; ``indexing`` makes tasks of a declared
dataset; ``progress`` adds up what trainers report.

Any number of masters may run: one holds ``master/lock``, the others wait for it. All of a master's writes name its
lock's create_revision, so a deposed one can write nothing.
"""
