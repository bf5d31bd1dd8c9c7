"""Blocks that move from one pserver to another while the job trains.

* ``values``: the stored owners and intent, the transactions that change them, and the messages between two pservers.
* ``server``: a pserver copies, freezes, stages and adopts blocks.
* ``director``: the master stores an intent, commits the move of each block, and cancels an intent that cannot go on.
* ``losses``: loss numbers of blocks decide which reports of finished work count although blocks move.

A block here is a position of the plan: a block of a parameter or a bucket of tables. Follow one from pserver 0 to
pserver 2. The master stores an *intent*. Pserver 0 reads it, sends a copy of the block to pserver 2, and goes on
applying pushes; each update follows the copy. Pserver 2 *stages* all of that: nobody can see it. When few updates are
under way, pserver 0 *freezes* the block: pushes wait, and the last message has the number of updates and the digest of
the content. Pserver 2 acknowledges to the master. The master *commits* in one transaction, which makes pserver 2 the
owner and compares everything that may have changed: the master's lock, the attempt, both generations, the owners.
Pserver 2 reads the owners and adopts the block; pserver 0 reads them and releases it. A trainer that pushes to
pserver 0 gets the new owner as the answer, and repeats the push under the same identity at pserver 2, which knows the
applied batches.

Only the transaction decides. A pserver thaws a frozen block only after it has read that the attempt is over and that
it is still the owner. A pserver that waits too long deletes the intent by a transaction of its own, and reads again.

The protocol is explored exhaustively in small configurations: two pservers and a spare, two masters, crashes at each
step, messages that are lost, late or repeated, and transactions of unknown outcome. No process runs it yet.
"""
