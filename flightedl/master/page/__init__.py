"""The job's web page, which shows its live status.

* ``answers``: the response at each path

The page consists of the files ``index.html``, ``page.css`` and ``page.js`` in this directory, which are served
unchanged. The page has no build step, loads no external resources, receives its data as server-sent events, and is
read-only.
"""
