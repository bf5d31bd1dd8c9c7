"""A trainer's data: work from the master, read into batches.

* ``job_data`` is what a session has of it: the training data, and evaluations.
* ``feed`` fetches work and reports it in the background. ``dataset`` turns it into batches, which ``readings`` reads,
  ``early_reads`` before they are given, and ``read_queue`` keeps until they are handed out; ``skipped`` tells what was
  passed over as corrupt.
* ``evaluation`` does this trainer's part of ``job.evaluate``.
"""
