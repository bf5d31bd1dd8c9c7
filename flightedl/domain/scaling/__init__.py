"""Choice of the number of trainers. This package depends on no other package.

* ``marginal``: adds trainers as long as each one increases throughput enough, and removes those that do not
"""
