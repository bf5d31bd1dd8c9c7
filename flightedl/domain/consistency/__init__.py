"""Consistency of training: when a block applies gradients, and which trainers wait for others.

* ``modes``: the consistency modes that users choose
* ``rounds``: rounds, clocks and versions of one block; ``rounds_values``: a block's answers
* ``membership``: the master's view of the trainers for which rounds wait; ``membership_values``: its effects
* ``views``: a pserver's view of these trainers

A trainer that gets its first task joins the membership. The master proposes the round at which it starts, and each
pserver admits the trainer if that round is still open. When all pservers have admitted it, the trainer pushes
gradients. In sync mode a block adds up gradients until all members have arrived, then applies the sum and opens the
next round.
"""
