"""Groups: ranks that train one model of their own and take the data together, in rounds.

* ``plan``: the pure function "batch of rank r in round k" of one epoch after the other.
* ``numbered``: batches by number, for trainings that count those that their model has.
* ``token``: the position of a group in its data, as text for the user's own checkpoints.
* ``incarnation``: starts of a group, their ranks and tokens, its end, and records that kill ranks.
"""
