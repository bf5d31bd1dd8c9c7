"""Groups: ranks that train their own model together, and read the data in rounds.

* ``plan``: the records of each rank in each round of every epoch
* ``numbered``: batches by number, for trainings that count the batches in their model
* ``token``: the position of a group in its data, as text for the user's own checkpoints
* ``incarnation``: starts of a group, their ranks and tokens, its end, and records that kill ranks

A start of a group: its ranks join an incarnation and declare the tokens that they loaded. Each rank then computes its
rounds by ``plan`` from the common token, so ranks need no communication about records. The user's checkpoint stores the
token of the last round. If a rank ends, the incarnation is over, and the launcher starts all ranks again.
"""
