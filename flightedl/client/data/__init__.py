"""A trainer's data: tasks from the master, read into batches.

* ``job_data``: training data and evaluations of one session; ``options``: options that control reading
* ``dataset``: the loop over this trainer's batches; ``feed``: tasks from the master, and reports to it
* ``read_ahead``, ``reading``, ``read_queue``: the reader thread, the reading of tasks, and the queue of batches
* ``transforms``, ``readers``, ``transform_process``: the user's transform, and the processes that run it
* ``elements``: batches built by a function that returns elements by index
* ``group_dataset``: the loop over a rank's rounds; ``pieces``: reading the records of a round
* ``ranks``, ``start_name``, ``attendance``: this process's rank, the name of its group's start, and its attendance
* ``numbered_dataset``: batches by number
* ``evaluation``: this trainer's part of ``job.evaluate``
* ``snapshots``: lists of the files of Delta and Iceberg tables

The feed receives a task, ``read_ahead`` reads its batches and puts them into the queue, and the loop hands them out and
reports the task when all of them are done.
"""
