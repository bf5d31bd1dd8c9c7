"""``flightedl bench sparse``: embedding tables.

``speed``: a pserver's rows against NumPy. ``growth``: what they cost as they become many. ``whole``: pull, push and
optimizer between processes (``workloads``, ``trainer``), against ``peer_redis`` and ``peer_rpc``.
"""
