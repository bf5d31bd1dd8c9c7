"""A trainer's data: the trainer receives tasks from the master and reads them as batches.

* ``job_data``: training data and evaluations of one session; ``options``: settings that control reading
* ``dataset``: the loop over this trainer's batches; ``slices``: slices of batches, for local steps
* ``losses``: report on data that was set aside
* ``feed``: thread that fetches and reports tasks
* ``read_ahead``, ``reading``, ``read_queue``: the reader thread, the readers of tasks, and the queue of batches
* ``transforms``, ``readers``, ``transform_process``: the user's transform, and the processes that run it
* ``elements``: batches whose elements the user's function returns by index
* ``group_dataset``: the loop over a rank's rounds; ``pieces``: a reader of a round's records
* ``ranks``, ``start_name``, ``attendance``: this process's rank, its group's start, and its membership in that start
* ``numbered_dataset``: batches by number
* ``evaluation``: this trainer's share of ``job.evaluate``
* ``snapshots``: lists of the files of Delta and Iceberg tables; ``shard_writer``: writing files

The feed receives a task. The reader thread reads the task's batches and puts them into the queue. The loop yields the
batches to the script, and reports the task when all of them are done.
"""
