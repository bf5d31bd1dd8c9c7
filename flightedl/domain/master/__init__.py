"""What a master decides: ``core`` takes events and gives effects; the master's process and the simulation carry them.

``events`` are the values that go in, ``effects`` those that come out. ``core`` puts the rooms together, which share a
``state``: ``declaring`` takes what trainers declare (``differences`` says what differs from what is declared already),
``requests`` answers trainers and people, now or later (``groups``: the ranks of a group; ``epoch_ends``: who stays a
member without work, and who joins with it), and ``control`` talks to pservers. ``work`` is one dataset's queue as
trainers meet it, ``evaluations`` are those beside the training data; ``members`` is the membership and the views that
come of it, ``deterministic_schedule`` what runs that are to be repeatable need beside; ``pservers`` is what the master
knows of pservers (``vigil`` watches over what they say), ``checkpointing`` the orders of checkpoints, ``ending`` when
the job may be said to be done. ``stored`` has the keys of all that, as the master's process and the simulation write
and read them.

Rule of every effect: it is carried out when the core's state at that revision is stored, so that nobody hears of what a
successor does not know. Rule of every event: nothing else changes the core, so that the same events, at the same times,
have the same effects.
"""
