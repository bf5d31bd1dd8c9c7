"""What makes a push count once, whoever sends it and however often.

* ``batches``: the identity of a batch. ``accumulation``: several batches in one push, on the trainer's side.
* ``applied``: which batches each block has taken in; ``cohorts`` keeps that once for the many blocks which have the
  same, ``intervals`` are the sets of numbers that it is made of.
"""
