"""Exactly-once application of batches, no matter which trainers push them and how often.

* ``batches``: identity of a batch
* ``accumulation``: pushes of several batches as one sum, on the trainer's side
* ``applied``: the batches that each block has applied
* ``cohorts``: blocks with the same applied batches, stored together
* ``intervals``: sets of numbers, stored as intervals

A push names its batches. The pserver marks them as applied on each block, in the same critical section that adds the
gradient. A block that has already applied a batch answers "already applied" and does not change.
"""
