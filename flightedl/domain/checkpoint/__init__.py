"""When a checkpoint is made, what makes it complete, and who reads what of it.

* ``checkpoints``: when one is ordered, and how it becomes complete; ``values`` its settings and effects.
* ``snapshot``: a pserver's side. ``manifest``: what makes files a checkpoint. ``pointer``: which one counts.
  ``restoring``: who reads what of it.
* ``chains``: which files have only what has changed in rows of tables, and what these are built on; ``changes``: what
  that is.
"""
