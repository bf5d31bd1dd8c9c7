"""Benchmarks: ratios measured in one run on the same machine, since machines are noisy. Not tests.

``dense``: push + optimizer + pull against bare Flight. ``bare`` is that reference: the fastest plain transport loop we
know, whose server does nothing but the optimizer on one array: no blocks, no identity, no checks.
"""
