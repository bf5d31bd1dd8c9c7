"""Blocks of parameters to record batches, and back. No sockets here.

``rows`` of a push or a pull, ``parts`` in the messages of a step, ``table_rows`` in parts of embedding tables;
``shared_values`` lie in memory that both sides map. The
JSON headers beside them are ``flightedl.messages``.

``schemas/`` (package ``flightedl_schemas``) holds the same contract as Arrow schemas for other languages; a test proves
that both agree.
"""
