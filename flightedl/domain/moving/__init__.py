"""Protocol that moves blocks between pservers while the job trains.

* ``values``: the stored intent, the transactions that change the intent and the placement, and the messages between two
  pservers
* ``server``: the pserver's side, which copies, freezes, stages and adopts blocks.
* ``sender``: when a pserver copies, freezes and gives up a unit.
* ``director``: the master's side, which stores intents, commits the move of each block, and cancels failed intents.
* ``balance``: the next moves towards an equal distribution.
* ``rebalancing``: moves away from busy pservers, according to measured loads.
* ``standby``: copies of a pserver's blocks for a standby, which never commit, and claims of indexes.

Here, a block is a position in the plan: a block of a parameter or a bucket of tables. For example, a block moves from
pserver 0 to pserver 2 in these steps:

* The master stores an *intent*. Pserver 0 reads it, sends a copy of the block to pserver 2, and continues to apply
  pushes. It sends each update after the copy.
* Pserver 2 *stages* the copy and the updates. No process can read staged content.
* When few updates are in flight, pserver 0 *freezes* the block: pushes wait, and the last message contains the number
  of updates and the digest of the content.
* Pserver 2 sends the master an acknowledgement. The master *commits* in one transaction, which makes pserver 2 the
  owner. It compares everything that may have changed: the master's lock, the attempt, both generations, and the
  placement.
* Pserver 2 reads the placement and adopts the block; pserver 0 reads it and releases the block. If a trainer then
  pushes to pserver 0, the answer names the new owner. The trainer repeats the push with the same identity at pserver 2,
  which knows the applied batches.

Only the transaction decides. A pserver thaws a frozen block only after it has read that the attempt is over and that it
still owns the block. If a pserver has waited too long, it deletes the intent in a separate transaction, and reads
again.

Tests explore the protocol exhaustively in small configurations: two pservers and a spare, two masters, crashes at each
step, messages that are lost, delayed or repeated, and transactions with unknown outcomes. ``pserver.moving`` drives the
side of the pservers.
"""
