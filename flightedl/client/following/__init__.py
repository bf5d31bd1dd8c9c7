"""A follower: a copy of a running job's model, kept up to date for serving in another process.

* ``follower``: the threads that ask the pservers for changes, and the copy as users see it
* ``copy``: the arrays and rows of the copy, and how a base or increment is applied
* ``tables``: the rows of one copy
"""
