"""Recording of the calls of a process's cores, replay, and stories about what happened.

* ``recorded``: construction of a core, recorded or not
* ``cores``: the inputs of each kind of core; ``calls`` records and replays them
* ``values``: conversion of arguments, events and effects to JSON and back
* ``redaction``: removal of private texts, such as passwords and paths; ``texts`` are the replacements
* ``writer`` and ``reader``: one file for each process
* ``replay``: comparison of recorded effects with those of this version
* ``moments``: human-readable events of a recorded run, which ``master_moments``, ``pserver_moments`` and
  ``trainer_moments`` find
* ``story``: the events of one batch, task, block, trainer or evaluation

A call's path: a process makes its core with ``recorded``. Each input of the core passes through ``calls``, which runs
it, and gives its arguments and effects to ``writer`` as one line of JSON. Later ``reader`` reads the file, and
``replay`` makes the same calls to a new core and compares the effects. Cores are pure, so they must be equal; a run
that failed can thus be investigated on another machine.
"""
