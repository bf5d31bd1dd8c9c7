"""Consistency of training: when a block applies gradients, and which trainers wait for others.

* ``modes``: the consistency modes that users choose
* ``rounds``: rounds, clocks and versions of one block; ``rounds_values``: its answers
* ``membership``: the view of trainers for which rounds wait, on the master; ``membership_values``: its effects
* ``views``: the view on a pserver

A trainer that gets its first task joins the membership. The master proposes the round at which it starts, and each
pserver admits the trainer if that round is still open. When all have done so, the trainer pushes gradients. In sync
mode a block adds them up until all members have arrived, then applies the sum and opens the next round.
"""
