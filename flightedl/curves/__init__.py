"""Learning curves: the values that scripts pass to ``job.log``, as data files and as plots.

* ``gathering``: means of a trainer's values over time intervals, so that a run of any length has a few thousand points
* ``files``, ``tensorboard``: a trainer's points in CSV files, and in TensorBoard event files
* ``merging``: one curve from the points of several trainers
* ``drawing``, ``vector``: curves as a PNG or SVG file
* ``terminal``: curves drawn with characters

In each trainer, ``gathering`` averages the logged values, and ``files`` appends the means to the trainer's file. At the
end of the run the files of all trainers are read, ``merging`` averages their points, and ``drawing`` draws the curves.
"""
