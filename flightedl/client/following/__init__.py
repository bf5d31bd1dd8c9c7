"""A follower: a copy of a running job's model, kept up to date for serving in another process.

* ``follower``: the threads that request changes from the pservers, and the copy as users see it
* ``consumer``: the name of a follower, held under a lease
* ``files``: copies in Parquet files, with increments
* ``serving``: a small lookup server on a follower
* ``copy``: the arrays and rows of the copy, to which bases and increments are applied
* ``tables``: the rows of one copy
"""
