"""Encoding of blocks and table rows for the network. No I/O.

* ``rows``: blocks as record batches, for pushes and pulls by any Flight client.
* ``parts``: messages of a step.
* ``table_rows``: rows of embedding tables, inside of a message of a step.
* ``shared_values``: values of messages in memory that both sides map.

A gradient of a step is a part of a message. Its values are in the message or in shared memory, and its header says
which blocks they belong to. The JSON requests that go with the messages are in ``flightedl.messages``.

``schemas/`` (package ``flightedl_schemas``) describes the same formats as Arrow schemas for other languages. A test
compares both.
"""
