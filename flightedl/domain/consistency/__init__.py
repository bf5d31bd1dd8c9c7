"""When a block takes its updates, and who waits for whom.

* ``modes``: the settings that users choose. ``rounds`` decides for a block, ``rounds_values`` is what it answers.
* ``membership`` is the master's side of whom rounds wait for (``membership_values`` what it hands on), ``views`` the
  pservers' side.
"""
