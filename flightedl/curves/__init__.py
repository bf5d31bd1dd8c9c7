"""Learning curves: the values that scripts pass to ``job.log``, as data files and as plots.

* ``gathering``: means of a trainer's values over intervals, so that a run of any length has a few thousand points
* ``files``: a trainer's points as a CSV file; ``tensorboard``: the points as a TensorBoard event file
* ``merging``: combines the points of several trainers into one curve
* ``drawing``, ``vector``: draw curves as a PNG or SVG file
* ``terminal``: draws curves with characters

In each trainer, ``gathering`` averages the logged values, and ``files`` appends the means to the trainer's file. At the
end of the run, ``files`` reads all files, ``merging`` averages their points, and ``drawing`` draws the curves.
"""
