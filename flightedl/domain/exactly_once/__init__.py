"""Exactly-once application of batches, regardless of who pushes them and how often.

* ``batches``: identity of a batch
* ``accumulation``: several batches in one push, on the trainer's side
* ``applied``: the batches that each block has applied
* ``cohorts``: blocks with the same applied batches, stored together
* ``intervals``: sets of numbers as intervals

A push names its batches. The pserver marks them as applied on each block, in the same critical section that adds the
gradient; a block that already has a batch answers "already applied" and does not change.
"""
