"""A trainer's data: work from the master, read into batches.

* ``feed`` fetches work and reports it in the background. ``dataset`` turns it into batches, which ``readings`` reads;
  ``skipped`` tells what was passed over as corrupt.
* ``evaluation`` does this trainer's part of ``job.evaluate``.
"""
