"""Recorded runs: the inputs of a process's cores and their results, written down, and run again.

* ``writer`` writes one file for each process; ``reader`` reads it. ``values`` writes values as JSON and reads them.
  ``redaction`` leaves out texts that a recording should not tell; ``texts`` are the texts in their place.
* ``recorded`` makes a core, recorded or not. ``cores`` lists the inputs of each kind of core; ``calls`` records these
  inputs and runs them again.
* ``replay`` runs a recording again, and compares.
* ``moments`` says what a call means to people; ``master_moments``, ``pserver_moments`` and ``trainer_moments`` find it.
  ``story`` tells the moments of one batch, task, block, trainer or evaluation.

A core is pure, so the same inputs have the same results: a run that went wrong can be run again elsewhere, and looked
at as long as it takes.
"""
