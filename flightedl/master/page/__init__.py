"""The job's web page, which shows the live status.

* ``answers``: the response for each path

The page consists of the files ``index.html``, ``page.css`` and ``page.js`` in this directory, which are served
unchanged. The page needs no build step and loads no external resources. It receives its data as server-sent events, and
cannot change the job.
"""
