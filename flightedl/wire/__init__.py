"""Messages to bytes and record batches, and back. No sockets here.

``messages``: the JSON headers, tickets and replies, as validated structs. ``rows``: blocks of parameters as Arrow
record batches. ``schemas/`` (package ``flightedl_schemas``) holds the same contract as Arrow and JSON schemas for
other languages; a test proves that both agree.
"""
