"""Encode blocks and table rows for the network, without I/O.

* ``rows``: blocks as record batches, for pushes and pulls by any Flight client
* ``parts``: the messages of a step
* ``changes``: parts of the feed that followers read
* ``table_rows``: rows of embedding tables, as content of a step's messages
* ``shared_values``: values in memory that both ends of a stream map
* ``shared_protocol``: which process may write which word of this memory, and when

A step sends gradients as parts of messages. A message's header lists the blocks of each part; their values are in the
message or in shared memory. The JSON requests that accompany the messages are defined in ``flightedl.messages``.

``schemas/`` (package ``flightedl_schemas``) describes the same formats as Arrow schemas, for other languages. A test
compares these schemas with the code.
"""
