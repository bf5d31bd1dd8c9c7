"""File formats for training data, saved models and checkpoints.

Training data:

* ``chunks``: chunks, the units of indexing and reading
* ``dataset_spec``: a user's description of a dataset
* ``index``, ``chunk_index``, ``stored_index``: building an index of chunks; the index itself; storing it
* ``following``: rules for adding files to a growing dataset
* ``layout``, ``mixed_layout``: grouping of chunks into tasks, for one or several sources
* ``reader``: reading the batches of a task
* ``record_places``: readable list of the files and record numbers in a batch
* ``convert``, ``readback``: conversion of a dataset to another format; comparison of the result with the source
* ``registry``: all formats, and the choice of a file's format
* ``parquet``, ``arrow_ipc`` (with ``arrow_messages``), ``recordio`` (with ``json_records``), ``csv_text``,
  ``json_lines``, ``lines``, ``tar_archive``, ``tfrecord``: one format per module; text formats and TFRecord share
  ``text`` and ``cutting``
* ``topics``: ranges of offsets of Kafka topics, which replace files
* ``decode``: functions that convert records to columns
* ``indices``: ranges of indices that replace files
* ``records``: requested columns and conditions
* ``schemas``, ``inference``: the common schema of a dataset's files; the types of columns in text files
* ``sources``, ``sinks``: opening files; writing files

Models:

* ``shard_files``, ``row_batches``: a pserver's file in a checkpoint; the rows of tables in that file
* ``checkpoint_files``, ``stored_tables``: reading the parameters and rows in a checkpoint, and adding rows to it
* ``range_file``: a stored file that is read in ranges
* ``columns``: parameters and tables as Arrow columns
* ``model_files``, ``table_files``: parameters and rows in formats of other programs
* ``row_sources``: rows to import, from datasets, arrays and lines of text

A record's path: ``index`` finds the record's chunk, and the master stores the index. ``layout`` assigns the chunk to a
task. The trainer that receives the task reads the chunk with ``reader``, which calls the ``read`` method of the chunk's
format, and divides the records into batches.

A parameter's path: each pserver writes its blocks with ``shard_files``. For recovery and export, ``checkpoint_files``
reads them; for an export, ``model_files`` writes them for other programs.

Only ``registry`` imports all formats, so a pserver loads only the few modules that it needs. Files are accessed only
through ``ports.Files``. Damage always raises a DataError that names the file and the location.
"""
