"""Rows of embedding tables in memory, as pservers and followers hold them.

* ``tables``: rows of all tables in a range of buckets
* ``table``: rows of one table
* ``layout``, ``memory``: allocation of a table's records, and the limit on row memory
* ``calls``: reads and updates of several tables with one call of compiled code
* ``threads``: a second thread for large messages
* ``values``: input and output types of the other modules
* ``cut``: consistent snapshot of the tables' content
* ``norms``: search for rows with a small norm, which cuts remove

A gradient's path: ``tables`` receives validated gradients, and applies them immediately or when their round closes.
``calls`` updates existing rows, and ``table`` creates rows for admitted ids.
"""
