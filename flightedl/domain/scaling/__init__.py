"""Choice of the number of trainers. This package does not depend on any other.

* ``marginal``: adds trainers while each one increases throughput enough, and removes those that do not
"""
