"""Recorded runs: what happened to the cores of a process and what came of it, written down, and run again.

* ``writer`` writes one file for each process, ``reader`` reads it. ``values`` is how events and effects are written,
  ``redaction`` what is left out.
* ``master``, ``pserver`` and ``blocks``, ``trainer``, ``loops`` and ``membership`` make cores that are recorded, and
  cores to which recorded events happen. ``replay`` lets these happen again, and compares.
* ``moments`` says what events mean to people, ``story`` tells those of one batch, task, block or trainer.

A core is pure, so the same events have the same effects: a run that went wrong can be run again elsewhere, and looked
at as long as it takes.
"""
