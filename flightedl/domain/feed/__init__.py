"""The feed: changes of the live model, in the order in which a client applies them.

* ``server``: a pserver's numbering of its changes, and its choice between an increment and a base
* ``follower``: a client's decision about which messages it applies
* ``consumers``: what named clients have acknowledged to a pserver

A pserver *numbers* its changes. Each number stands for the changes to blocks and rows since the previous number. A
block keeps only the number of its last change. An *increment* after number s thus contains the current content of
everything that changed after s, and the ids of removed rows. It exists for any s, and can be applied twice. A *base*
contains everything.

A client gets a base if its position names another process of the pserver, because the new process may have restored an
older state than the client has.

Expired rows are not listed: increments contain the lowest versions and epochs of unexpired rows, by which clients
remove the same rows.

A client may stop at checkpoints. When a checkpoint is ordered, it gets a number of its own, its *mark*. Changes after
the checkpoint's cut have higher numbers. The cut is kept for a while, so a client at a lower number gets an increment
that ends exactly with the checkpoint's state. Clients that have passed the mark wait for the next checkpoint.

If a block moves to another pserver, its new owner sends the complete block and the version of the placement. A client
keeps that version for each block, and ignores what a former owner sent before the move.

If the model starts over, for example because its job was forgotten and started again, versions of the placement begin
again, too. A client then fills an empty copy from bases of the new life, and ignores messages of earlier lives.

A client is up to date only when, for each block, it has a new answer from a pserver that was the block's owner. While
blocks move, answers of all pservers may lack a block: its new owner answered before it adopted the block, and its
former owner answered after it had released the block. The former owner may also lag behind and still have the block
after the new owner has changed it. But the former owner froze the block before the new owner changed it, and has listed
it as *leaving* since then. So the content of a leaving block is applied, but does not show that the client is up to
date; see ``FollowedFeeds.covers``.
"""
