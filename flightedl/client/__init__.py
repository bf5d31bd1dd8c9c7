"""What a trainer imports: a session with the job, its data, its parameters.

Map: ``session`` opens and closes everything (``connect``, :class:`~flightedl.client.session.Job`); ``registration``
keeps the trainer's lease; ``servers`` finds and calls master and pservers, riding through their restarts;
``arguments`` checks what the script passes; ``loading`` reads models to begin with;
``participation`` fetches tasks and keeps the trainer a member; ``dataset`` turns tasks into batches and reports them;
``parameters`` pushes gradients and pulls values;
``ending`` knows which pservers' values are the result; ``waiting`` tells the user what is being waited for.

One batch is *current* at a time (``batches.CurrentBatch``): the dataset opens it before the user's code sees it, the
parameters push under its identity, and the dataset closes it when the next one is asked for. Closing makes the batch
arrive, with weight zero, at every block it was not pushed to: a task is reported as finished only when every block of
every pserver has an answer for every batch of it.
"""
