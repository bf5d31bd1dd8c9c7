"""A trainer's data: work from the master, read into batches.

* ``job_data`` is what a session has of it: the training data, and evaluations.
* ``feed`` fetches work and reports it in the background. ``dataset`` turns it into batches, which ``reading`` reads and
  ``read_queue`` keeps until they are handed out.
* ``evaluation`` does this trainer's part of ``job.evaluate``.
"""
