"""The JSON messages of the protocol, as validated structs: requests, replies, and values in etcd.

* ``base``: bases of all messages. ``decoding``: decoders that threads may share.
* ``declarations``: the definition of a job. ``hosts``: facts about a process and its machine.
* ``tasks``, ``groups``: from trainers to the master. ``parameters``: from trainers to pservers.
* ``control``: from the master to pservers.
* ``checkpoints``, ``status``: from any client to servers.

``schemas/`` (package ``flightedl_schemas``) describes the same messages as JSON schemas for other languages. A test
compares both.
"""
