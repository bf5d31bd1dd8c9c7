"""Records the calls to a process's cores, and replays them.

* ``recorded``: constructs a core, with or without recording
* ``cores``: the inputs of each kind of core; ``calls``: records and replays inputs
* ``values``: converts arguments, events and effects to JSON and back
* ``redaction``: removes private strings, such as passwords and paths; ``texts``: what replaces them
* ``writer``: writes the file of one process; ``reader``: reads it
* ``replay``: compares recorded effects with those of the current version
* ``account``: counts how often each block applied each batch; ``spans``: finds the blocks that a record concerns

A process constructs its core with ``recorded``. Each input of the core passes through ``calls``, which runs it and
passes the arguments and effects to ``writer`` as one line of JSON. Later, ``reader`` reads the file, and ``replay``
makes the same calls to a new core and compares the effects. Because cores are pure, the effects must be equal, so a
failed run can be investigated on another machine.
"""
