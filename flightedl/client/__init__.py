"""What a trainer imports: a session with the job, its data, its parameters.

``session`` is what the script has (``connect``, :class:`~flightedl.client.session.Job`), ``process`` what that is made
of. What it has of the job's data is in ``data``, what it has of the model in ``model`` and ``tables``. Around them:

* ``registration`` keeps the trainer's lease, ``participation`` keeps it a member; ``connections`` finds and calls
  master and pservers, riding through their restarts.
* ``arguments`` checks what the script passes; ``waiting`` tells the user what is being waited for; ``probe`` notes
  where a loop's time goes; ``progress`` reports to the master, to Prometheus, and to files of what the script logs.
* ``once`` gives a name to one trainer.

What is decided about all this is in ``domain.trainer``; here are the threads and connections around it.

One batch is *current* at a time (``CurrentBatch``): the dataset opens it before the user's code sees it, the
parameters push under its identity, and the dataset closes it when the next one is asked for. Closing makes the batch
arrive, with weight zero, at every block it was not pushed to: a task is reported as finished only when every block of
every pserver has an answer for every batch of it.
"""
