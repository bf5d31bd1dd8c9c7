"""Recording of the calls to a process's cores, their replay, and stories of what happened in a run.

* ``recorded``: construction of a core, with or without recording
* ``cores``: the inputs of each kind of core; ``calls``: recording and replaying of inputs
* ``values``: conversion of arguments, events and effects to JSON and back
* ``redaction``: removal of private strings, such as passwords and paths; ``texts``: their replacements
* ``writer`` and ``reader``: one file for each process
* ``replay``: comparison of recorded effects with those of the current version
* ``moments``: human-readable events of a recorded run, found by ``master_moments``, ``pserver_moments`` and
  ``trainer_moments``
* ``story``: the events of one batch, task, block, trainer or evaluation
* ``account``: number of times that each block counted each batch; ``spans``: the blocks that a record concerns

A process constructs its core with ``recorded``. Each input of the core passes through ``calls``, which runs it and
passes its arguments and effects to ``writer`` as one line of JSON. Later, ``reader`` reads the file, and ``replay``
makes the same calls to a new core and compares the effects. Cores are pure, so the effects must be equal. A failed run
can thus be investigated on another machine.
"""
