"""A trainer's data: work from the master, read into batches.

* ``job_data`` is what a session has of it: the training data, and evaluations.
* ``feed`` fetches work and reports it in the background. ``dataset`` turns it into batches, which ``reading`` reads and
  ``read_queue`` keeps until they are handed out.
* ``group_dataset`` gives batches to the ranks of a group in rounds. ``ranks`` finds out which rank this process is, and
  ``pieces`` reads its records.
* ``evaluation`` does this trainer's part of ``job.evaluate``.
"""
