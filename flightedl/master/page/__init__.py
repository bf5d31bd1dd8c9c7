"""The job's web page, which shows the live status.

* ``answers``: the response for each path

The page consists of the files ``index.html``, ``page.css`` and ``page.js`` in this directory, which are served
unchanged. It needs no build step, loads no external resources, receives its data as server-sent events, and cannot
change the job.
"""
