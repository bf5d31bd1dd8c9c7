"""Consistency of training: when a block applies gradients, and which trainers wait for which.

* ``modes``: the consistency modes from which users choose
* ``rounds``: rounds, clocks and versions of one block; ``rounds_values``: the answers of a block
* ``membership``: the master's view of the trainers for which rounds wait; ``membership_values``: its effects
* ``views``: a pserver's copy of the view

When a trainer gets its first task, it joins the membership. The master proposes the round at which the trainer starts,
and each pserver admits it if that round has not closed yet. The trainer pushes gradients once all pservers have
admitted it. In sync mode a block adds up gradients until all members have arrived, then applies the sum and opens the
next round.
"""
