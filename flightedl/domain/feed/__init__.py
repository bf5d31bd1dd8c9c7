"""The feed: changes of the live model, in the order in which a client applies them.

* ``server``: a pserver's numbering of its changes, and its choice between an increment and a base
* ``follower``: a client's choice of the messages that it applies

A pserver counts *numbers*. Each number stands for the changes of blocks and rows since the previous number, and a block
keeps only the number of its last change. An *increment* after number s thus contains the present content of everything
that changed after s, and the ids of removed rows: it can be made for any s, and can be applied twice. A *base* contains
everything. If the pserver is replaced, its successor may have restored an older state, so numbers of another process
mean nothing: a client whose position names another process gets a base. Rows that expire are not listed. Increments
contain the lowest versions and epochs of unexpired rows, by which clients remove the same rows.

If a block moves to another pserver, its new owner sends it as a whole, with the version of the placement. A client
keeps that version for each block, and ignores what a former owner sent before the move.
"""
