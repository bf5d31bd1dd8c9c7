"""The rows of embedding tables on a parameter server.

Map:

* ``store`` has the spans of a pserver's buckets; ``incoming`` checks what a message says about rows
* ``span`` carries out what is decided about rows
* ``tables`` keeps the rows of all tables: ``table`` has those of one, in memory that ``layout`` makes and ``memory``
  bounds; ``calls`` reads and updates many tables at once, on two cores (``threads``) where rows are many; ``values`` go
  in and out
* ``cut`` is the content of the tables at one moment, without the rows whose norm is too small (``norms``)
* ``stored`` brings a cut to files and back, and ``first`` loads rows from a user's file
"""
