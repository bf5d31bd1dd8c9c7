"""Encoding of blocks and table rows for the network. No I/O.

* ``rows``: blocks as record batches, for pushes and pulls by any Flight client.
* ``parts``: messages of a step.
* ``table_rows``: rows of embedding tables, inside of a message of a step.
* ``shared_values``: values of messages in memory that both sides map.

A step sends the gradients of blocks as parts of a message. The header lists the blocks; the values are in the message
or in shared memory. The JSON requests that are sent with the messages are in ``flightedl.messages``.

``schemas/`` (package ``flightedl_schemas``) describes the same formats as Arrow schemas for other languages. A test
compares both.
"""
