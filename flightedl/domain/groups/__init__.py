"""Groups: ranks that train a model of their own together and read the data in rounds.

* ``plan``: the records of each rank in each round of every epoch
* ``numbered``: batches by number, for training loops whose model counts its batches
* ``token``: the position of a group in its data, as text for the user's own checkpoints
* ``incarnation``: starts of a group, their ranks and tokens, the group's end, and records that kill ranks

When a group starts, its ranks join an incarnation and declare the tokens that they loaded. From the common token, each
rank then computes its rounds with ``plan``, so ranks need no communication about records. The user's checkpoint stores
the token of the last round. If a rank ends early, the incarnation is over, and the launcher starts all ranks again.
"""
