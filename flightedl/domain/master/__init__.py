"""Decisions of a master: ``core`` takes events and returns effects, which a process or the simulation carries out.

``events`` are the values that go in, ``effects`` those that come out. ``core`` has these rooms and calls them:

* ``leases``: the trainers that are there
* ``declaring``: the declared dataset and model (``differences``: the comparison with a later declaration)
* ``training``: the training data's queue (``work``, as trainers meet it), and who gets which task when
  (``deterministic_schedule``, ``epoch_ends``)
* ``evaluations``: other datasets, beside the training data
* ``groups``: the ranks of a group, which get the training data together
* ``members``: the membership, and the views that come of it
* ``pservers``: what is known of the pservers; ``control``: the conversation with them (``vigil`` watches their status)
* ``checkpointing``: orders of checkpoints
* ``ending``: the end of epochs, and of the job
* ``requests``: a request that waits
* ``stored``: the keys of all that, as the master's process and the simulation write and read them; ``state``: settings,
  and what a master goes on from

A ticket of a trainer comes in as ``Asked``. The core requires the trainer's lease, has ``pservers`` say which reports
count, applies those to the queue, has ``training`` hand out tasks, lets the trainer leave or join, and replies. While
there is no work, the ticket waits.

Rule of every effect: it is carried out when the core's state at that revision is stored, so that nobody hears of what a
successor does not know. Rule of every event: nothing else changes the core, so that the same events, at the same times,
have the same effects.
"""
