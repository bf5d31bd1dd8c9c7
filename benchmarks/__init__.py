"""Measurements for developers, run from a clone by ``python -m benchmarks.NAME``; users have ``flightedl bench``.

* ``step_calls``: calls that one small step makes, in the trainer and the pserver.
"""
