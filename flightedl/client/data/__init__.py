"""A trainer's data: tasks from the master, read into batches.

* ``job_data``: training data and evaluations of one session; ``options``: its options for reading
* ``dataset``: the loop over this trainer's batches; ``feed``: tasks from the master, and reports to it
* ``read_ahead``, ``reading``, ``read_queue``: the reader thread, reading of tasks, and the queue of batches
* ``transforms``, ``readers``, ``transform_process``: the user's function for batches, and processes that run it
* ``elements``: batches from a function that returns elements by index
* ``group_dataset``: the loop over a rank's rounds; ``pieces``: reading of its records
* ``ranks``, ``start_name``, ``attendance``: this process's rank, the name of its group's start, and its part in it
* ``numbered_dataset``: batches by number
* ``evaluation``: this trainer's part of ``job.evaluate``
* ``snapshots``: files of Delta and Iceberg tables

The feed receives a task, ``read_ahead`` reads its batches and puts them into the queue, and the loop hands them out and
reports the task when all of them are done.
"""
