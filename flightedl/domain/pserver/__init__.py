"""What a pserver decides, without its arrays, threads and sockets; the real process and the simulated one run it.

* ``life``: from an index to the end: what it builds, loads, waits for and serves; ``life_values`` are its states, what
  happens to it and what follows.
* ``blocks``: what pushes, pulls, views, snapshots and first values do to its blocks; ``block_values`` are what comes to
  them, what they answer, and what follows for their values.
* ``first_values``: which first values each block has. ``search``: which checkpoint is loaded.
"""
