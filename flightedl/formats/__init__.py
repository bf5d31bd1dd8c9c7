"""The formats of training data: index a file, read a chunk of it, write one.

Start with ``chunks`` (what a chunk is) and ``dataset_spec`` (what a user says of the data), then follow the data:
``index`` finds the chunks of a dataset (in parallel) and gives them as a ``chunk_index``;
``stored_index`` keeps them beside the checkpoints; ``layout`` groups them into tasks; ``reader`` turns the chunks of
one task into its batches. ``following`` decides which files join a dataset that grows. ``convert`` writes a dataset in
another format.

One module for each format: ``parquet``, ``arrow_ipc`` (with ``arrow_messages``), ``recordio``, ``csv_text`` and
``json_lines`` (what they share: ``text``, ``cutting``), ``tar_archive``. Below them: ``records`` (columns, conditions),
``schemas`` (one schema for all files), ``sources`` and ``sinks`` (files in and out), ``record_places`` (which records a
batch has, for people).

Of the model: ``shard_files`` (what one pserver writes for a checkpoint; ``row_batches``: rows of tables in it),
``checkpoint_files`` (reads them; ``stored_tables``: a table's rows out of all), ``range_file`` (a stored file as Arrow
wants one), ``model_files`` (one file for others to load, and read back), ``table_files`` (the same of a table's rows).

``registry`` knows all formats and imports them; who needs one module only, as pservers do, never loads the others.

Files are reached through ``ports.Files`` only. Whatever is wrong with a file is a DataError that names file and place.
"""
