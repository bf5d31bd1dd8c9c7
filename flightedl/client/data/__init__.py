"""A trainer's data: work from the master, read into batches.

* ``job_data`` is what a session has of it: the training data, and evaluations.
* ``feed`` fetches work and reports it in the background. ``dataset`` turns it into batches, which ``reading`` reads in
  the thread of ``read_ahead``, and ``read_queue`` keeps until they are handed out.
* ``transforms`` has the user's function for batches, ``readers`` the processes that run it (``transform_process``).
* ``group_dataset`` gives batches to the ranks of a group in rounds. ``ranks`` finds out which rank this process is,
  ``pieces`` reads its records, and ``attendance`` is its part in the start of the group, which ``start_name`` names.
* ``numbered_dataset`` gives the batches whose numbers a script asks for.
* ``evaluation`` does this trainer's part of ``job.evaluate``.
"""
