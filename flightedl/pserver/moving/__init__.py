"""Moving blocks between live pservers, as ``domain.moving`` decides.

* ``mover``: reads placement and intents, copies units that leave, and serves the messages of other pservers
* ``peers``: access to etcd, the master and the other pservers
* ``departure``: content of a departing unit
* ``arrival``: content of an arriving unit, staged until the unit is adopted
* ``parcels``: encoding of the content
* ``copies``: copies of all blocks for a standby; ``standby``: the standby's side

A unit's path: ``mover`` reads an intent, and its thread uploads the rows of a ``departure`` while pushes continue, then
the rows that these pushes have changed. When little is left, the shard freezes the unit. The thread uploads the rest,
with dense blocks and the record of applied batches. The destination's ``arrival`` is now complete, and its mover
informs the master. When both movers read the new placement, the destination adopts the unit, and the source drops it.
"""
