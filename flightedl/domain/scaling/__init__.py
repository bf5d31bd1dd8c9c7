"""Choice of the number of trainers. Independent of the other packages.

* ``marginal``: adds trainers while each one increases throughput enough, and removes those that do not
"""
