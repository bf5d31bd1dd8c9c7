"""A trainer's embedding tables.

* ``table``: the user's interface, with pull, push, load and export
* ``ids``: conversion of users' values to 64-bit ids
* ``bags``: combination of several rows into one row, and the corresponding gradients
* ``requests``: the distinct ids of a request, divided by pserver
* ``traffic``: payloads of pushes and lookups
* ``rows``: a trainer's pending gradients, current lookups and prefetched rows

A row's path: ``table.pull`` converts the user's values to ids, removes duplicates, and looks up the ids on the pservers
that own their buckets. Each row is copied to all positions of its id in the request, or combined into bags.
``table.push`` sums gradients by id and keeps them until the current batch's step. The step sends them on the same
streams as the model's gradients, under the same batch identity (see ``client.model``).
"""
