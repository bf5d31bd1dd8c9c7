"""The rows of embedding tables on a parameter server.

Map:

* ``store``: spans of a pserver's buckets
* ``incoming``: decoding and validation of the rows in messages
* ``span``: effects of the block protocol on the rows of a span
* ``tables``: rows of all tables in a span
* ``table``: rows of one table
* ``layout``, ``memory``: allocation of a table's records, and the limit on row memory
* ``calls``: reads and updates of several tables with one call of compiled code
* ``threads``: a second thread for large messages
* ``values``: input and output types of the other modules
* ``cut``: consistent snapshot of the tables' content
* ``norms``: search for rows with a small norm, which cuts remove
* ``stored``: conversion between cuts and the records of a file
* ``first``: loading of a table's initial rows from a user's file

A gradient's path: ``store`` finds the spans of the buckets in a message, and ``incoming`` validates the message. The
block protocol decides. ``span`` passes the gradients to ``tables``, either immediately or when their round closes.
``calls`` updates existing rows, and ``table`` creates rows for admitted ids.
"""
