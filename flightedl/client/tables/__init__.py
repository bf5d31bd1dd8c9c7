"""A trainer's embedding tables.

* ``table``: the user's interface, with pull, push, load and export
* ``ids``: converting the user's values to 64-bit ids
* ``bags``: combining several rows into one, and the gradients of the combined rows
* ``requests``: the distinct ids of a request, divided by pserver
* ``traffic``: payloads of pushed gradients and of lookups
* ``rows``: a trainer's rows between calls: pending gradients and prefetched rows

The path of a row: ``table.pull`` converts the user's values to ids, removes duplicates, and looks the ids up at the
pservers that own their buckets. The rows are copied to every position of their id in the request, or combined into
bags. ``table.push`` sums gradients by id. They stay pending until the current batch's step, which sends them on the
streams of the model's steps under the same batch identity (see ``client.model``).
"""
