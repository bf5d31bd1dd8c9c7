"""The protocol's JSON messages, as validated structs: requests, replies, and values stored in etcd.

* ``base``: base classes of all messages. ``decoding``: thread-safe decoders.
* ``declarations``: the definition of a job. ``hosts``: properties of a process and its machine.
* ``tasks``, ``groups``: messages from trainers to the master. ``parameters``: messages from trainers to pservers.
* ``control``: messages from the master to pservers.
* ``moving``: messages between pservers about blocks that move. ``scaling``: changes to the number of pservers.
* ``checkpoints``, ``status``, ``reading``, ``feed``: messages from any client to a server.

``schemas/`` (package ``flightedl_schemas``) describes the same messages as JSON schemas, for other languages. A test
compares these schemas with the code.
"""
