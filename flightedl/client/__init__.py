"""What a trainer imports: a session with the job, its data, its parameters.

The session. ``session`` opens and closes everything (``connect``, :class:`~flightedl.client.session.Job`);
``arguments`` checks what the script passes; ``registration`` keeps the trainer's lease; ``servers`` finds and calls
master and pservers, riding through their restarts; ``waiting`` tells the user what is being waited for; ``progress``
tells the master what this trainer did, ``raised`` where in the script an error was raised. ``once`` gives a name to
one trainer, ``saving`` the writing of the model.

What is decided about all this is in ``domain.trainer``; here are the threads and connections around it.

The data. ``feed`` fetches work and reports it in the background, under ``participation``, which also keeps the trainer
a member; ``dataset`` turns work into batches, which ``readings`` reads; ``skipped`` tells what was passed over as
corrupt. ``evaluation`` does this trainer's part of ``job.evaluate``.

The model. ``declared`` makes its first arrays, ``election`` chooses whose values they are. ``parameters`` pushes
gradients and pulls values: ``gradients`` checks them, ``accumulating`` adds up those of several batches, ``feedback``
keeps what 16 bits round off, ``transfers`` cuts what one pserver is sent, ``values`` is where the model lies.
``ending`` knows which pservers' values are the result, ``loading``
reads them from a file or a checkpoint.

One batch is *current* at a time (``CurrentBatch``): the dataset opens it before the user's code sees it, the
parameters push under its identity, and the dataset closes it when the next one is asked for. Closing makes the batch
arrive, with weight zero, at every block it was not pushed to: a task is reported as finished only when every block of
every pserver has an answer for every batch of it.
"""
