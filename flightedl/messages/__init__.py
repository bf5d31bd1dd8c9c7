"""The JSON messages of the protocol, as validated structs: what processes say to each other, and keep in etcd.

``base`` is what all have in common, ``decoding`` reads them safely in threads, ``hosts`` is what any process says of
itself. The others are kept by who talks to
whom: ``declarations`` (what a job is), ``tasks`` (trainer to master), ``parameters`` (trainer to pserver), ``control``
(master to pserver), ``checkpoints`` and ``status`` (anybody to servers). They are values, which the domain takes and
gives like any other.

``schemas/`` (package ``flightedl_schemas``) holds the same contract as JSON schemas for other languages; a test proves
that both agree.
"""
