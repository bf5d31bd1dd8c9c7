"""File formats: training data, stored models and checkpoints.

Training data:

* ``chunks``: chunks, the unit of indexing and reading
* ``dataset_spec``: a user's description of a dataset
* ``index``, ``chunk_index``, ``stored_index``: building an index of chunks, the index itself, and its stored form
* ``following``: files joining a growing dataset
* ``layout``, ``mixed_layout``: grouping chunks into tasks, for one or several sources
* ``reader``: reading the batches of a task
* ``record_places``: readable list of a batch's files and record numbers
* ``convert``: rewriting a dataset in another format
* ``registry``: all formats, and the choice of a file's format
* ``parquet``, ``arrow_ipc`` (with ``arrow_messages``), ``recordio``, ``csv_text``, ``json_lines``, ``tar_archive``: one
  format per module; the text formats share ``text`` and ``cutting``
* ``indices``: ranges of indices instead of files
* ``records``, ``schemas``: columns and conditions, and the common schema of a dataset
* ``sources``, ``sinks``: opening files, and writing files

Models:

* ``shard_files``, ``row_batches``: a pserver's file in a checkpoint, and the rows of tables in it
* ``checkpoint_files``, ``stored_tables``: reading a checkpoint's parameters and rows
* ``range_file``: a stored file read by ranges
* ``columns``: Arrow columns of parameters and tables
* ``model_files``, ``table_files``: parameters and rows in formats that other programs read

A record's path: ``index`` finds its chunk and the master stores the index. ``layout`` puts the chunk into a task; a
trainer that receives the task reads the chunk with ``reader``, through its format's ``read``, and cuts its records into
batches. A parameter's path: each pserver writes its blocks with ``shard_files``; on recovery or export
``checkpoint_files`` reads them, and ``model_files`` writes them for other programs.

Only ``registry`` imports all formats, so a pserver loads only the few modules it needs. Files are accessed only through
``ports.Files``. Any damage raises a DataError that names the file and the location.
"""
