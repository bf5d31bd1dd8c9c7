"""Groups: ranks that together train their own model and read the data in rounds.

* ``shuffling``: the number of lanes and the size of their windows, and what follows from them for users
* ``lanes``: order of an epoch's records in lanes
* ``plan``: the records of the lanes that each rank gets in each round
* ``numbered``: batches requested by number, for training loops whose model counts its batches
* ``token``: position of a group in its data, as text for the user's own checkpoints
* ``incarnation``: starts and ends of a group, the tokens of its ranks, and detection of records that kill ranks

When a group starts, its ranks join an incarnation and report the token that they loaded. From the token, each rank
computes its rounds with ``plan`` and their records with ``lanes``, so ranks need not communicate about records. The
user's checkpoint stores the token after its last round. If a rank ends early, the incarnation is over, and the launcher
restarts all ranks.
"""
