"""Values that scripts give to ``job.log``, as files and as pictures.

``gathering`` makes means of them, of shorter or longer stretches of time, so that a run of any length has few thousand.
``files`` writes what a trainer has gathered, as CSV and, if wanted, as ``tensorboard`` event files, and reads it back.
``merging`` makes one curve of what several trainers wrote. ``drawing`` draws curves to a file, for whoever has any (as
SVG: ``vector``), and ``terminal`` draws them with characters.
"""
