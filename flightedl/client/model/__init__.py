"""A trainer's model: first values, pushes, pulls, and files with values.

* ``declared`` makes its first arrays, ``election`` chooses whose values they are.
* ``parameters`` pushes gradients and pulls values: ``gradients`` checks them, ``accumulation`` adds up those of several
  batches, ``feedback`` keeps what 16 bits round off, ``transfers`` cuts what one pserver is sent, ``values`` is where
  the model lies.
* ``loading`` reads values from a file or a checkpoint; ``saving`` has one trainer write them.
"""
