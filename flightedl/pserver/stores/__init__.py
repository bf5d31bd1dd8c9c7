"""The stores of a shard, which carry out what ``domain.pserver.blocks`` decides.

* ``held``: the two stores, with their block protocol and locks
* ``soundness``: detection of interrupted changes, after which values and protocol state are inconsistent
* ``changes``: wakes clients that wait for a version
* ``interface``: types of spans and stores, and the values that a shard exchanges with them
* ``dense``: store for parameters; ``rows``: store for embedding tables
* ``incoming_rows``: decoding and validation of the rows in messages
* ``first_rows``: loading of a table's initial rows from a user's file
* ``stored_rows``: conversion between cuts of rows and the records of a file
* ``building``: allocation of the spans of a shard plan
* ``array_span``: arrays of adjacent blocks that are updated in one kernel call; ``row_span``: rows of adjacent buckets
* ``arena``: memory allocator for the blocks' arrays

A gradient's path: a store finds the spans of the blocks in a message and validates it. The block protocol decides. Then
an ``array_span`` calls the optimizer's kernel, or a ``row_span`` passes the gradients to ``rowstore.tables``.
"""
