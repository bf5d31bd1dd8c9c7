"""Recorded runs: what happened to the cores of a process and what came of it, written down, and run again.

* ``writer`` writes one file for each process, ``reader`` reads it. ``values`` is how events and effects are written,
  ``redaction`` what is left out of texts, ``redacted_values`` of events and effects.
* ``master``, of a pserver ``pserver`` (its life), ``blocks`` and ``snapshots``, of a trainer ``trainer`` (its feed),
  ``loops`` and ``acknowledged``, ``membership``, ``elections`` and ``endings`` make cores that are recorded, and cores
  to which recorded events happen. For a trainer's steps these are ``steps`` and ``step_player``, and ``step_values``
  what happens. ``trainer_cores`` makes a trainer's cores, recorded or not. ``replay`` lets what happened happen again,
  and compares.
* ``moments`` is what events mean to people; ``master_moments``, ``pserver_moments`` and ``trainer_moments`` find them.
  ``story`` tells those of one batch, task, block, trainer or evaluation.

A core is pure, so the same events have the same effects: a run that went wrong can be run again elsewhere, and looked
at as long as it takes.
"""
