"""Messages to bytes and record batches, and back. No sockets here.

``messages`` encodes and decodes the JSON headers, tickets and replies, which are validated structs, by who speaks to
whom: ``messages_declared`` (what a job is), ``messages_work`` (trainer to master), ``messages_parameters`` (trainer to
pserver), ``messages_orders`` (master to pserver), ``messages_checkpoints`` and ``messages_status`` (anybody to
servers). Blocks of parameters travel as Arrow record batches: ``rows`` of a push or a pull, ``parts`` in the messages
of a step, ``halves`` where their elements have 16 bits.

``schemas/`` (package ``flightedl_schemas``) holds the same contract as Arrow and JSON schemas for other languages; a
test proves that both agree.
"""
