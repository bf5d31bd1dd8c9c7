"""Checkpoints of a job: how they are made, completed and restored.

* ``checkpoints``: the master's side, from the order to completion; ``values``: its settings and effects
* ``snapshot``: a pserver's side
* ``manifest``: the document that turns a set of files into a checkpoint; ``pointer``: the stored pointer to the newest
  one
* ``chains``: increments, which contain only changed rows of tables; ``changes``: a pserver's record of changed rows
* ``cuts``: the round of a cut of all pservers that is made on request
* ``restoring``: the parts of a checkpoint that each pserver reads

The master orders a checkpoint and agrees with the pservers on a round. When that round opens, each pserver copies its
blocks and writes them to one file. Once all files have been reported, the master writes the manifest and then moves the
pointer, in the same transaction that stores the queue.
"""
