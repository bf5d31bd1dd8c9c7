"""Learning curves: the values that scripts pass to ``job.log``, as files and as pictures.

* ``gathering``: means of a trainer's values over periods of time, so that a run of any length has a few thousand points
* ``files``, ``tensorboard``: a trainer's points as CSV files, and as TensorBoard event files
* ``merging``: one curve from the points of several trainers
* ``drawing``, ``vector``: curves as a PNG or SVG file
* ``terminal``: curves drawn with characters

A logged value is averaged by its trainer's ``gathering``, appended to the trainer's file by ``files``, read with those
of the other trainers at the end of the run, averaged with them by ``merging``, and drawn by ``drawing``.
"""
