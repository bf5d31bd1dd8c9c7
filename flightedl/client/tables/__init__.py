"""A trainer's embedding tables.

* ``table`` is what the user calls. ``ids`` makes 64-bit ids of what the user has, ``bags`` puts rows together.
* ``requests``: each id once, and by pserver. ``traffic``: what is pushed with the next step, and what is looked up.
* ``rows`` is what there is between the calls: what waits for the step, and what came in advance.

Rows travel on the streams of the model's steps, under the same batch identities: see ``client.model``.
"""
