"""A trainer's embedding tables.

* ``table``: the user's interface, with pull, push, load and export
* ``ids``: conversion of the user's values to 64-bit ids
* ``bags``: combining several rows to one, and the gradients of this
* ``requests``: distinct ids of a request, divided by pserver
* ``traffic``: payloads of pushed gradients and of lookups
* ``rows``: a trainer's rows between calls: pending gradients and prefetched rows

A row's way: ``table.pull`` converts the user's values to ids, keeps each id once, and looks the ids up at the pservers
that own their buckets. The rows are spread over the ids as given, or combined to bags. ``table.push`` sums gradients by
id. They stay pending until the current batch's step, which sends them on the streams of the model's steps under the
same batch identity (see ``client.model``).
"""
