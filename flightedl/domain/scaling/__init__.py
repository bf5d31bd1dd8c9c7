"""Choice of the numbers of trainers and pservers. This package depends on no other package.

* ``marginal``: adds trainers as long as each one increases throughput enough, and removes those that do not
* ``pservers``: adds pservers while they limit the job
"""
