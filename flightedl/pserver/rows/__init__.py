"""The rows of embedding tables on a parameter server.

Map:

* ``store``: spans of a pserver's buckets
* ``incoming``: decoding and validation of the rows in a message
* ``span``: effects of the block protocol on the rows of a span
* ``tables``: rows of all tables in a span
* ``table``: rows of one table
* ``layout``, ``memory``: allocation of a table's records, and the limit on their memory
* ``calls``: reads and updates of many tables in one call of compiled code
* ``threads``: a second thread for large messages
* ``values``: inputs and outputs of the modules above
* ``cut``: content of the tables at one moment
* ``norms``: search for rows whose norm is too small, which a cut removes
* ``stored``: conversion of a cut to records of a file, and back
* ``first``: loading a table's initial rows from a user's file

A gradient's path: ``store`` finds the spans of a message's buckets and lets ``incoming`` validate the message. The
protocol decides, and ``span`` passes the gradients to ``tables``, at once or when their round closes. ``calls`` updates
the rows that exist, and ``table`` creates those that are admitted.
"""
