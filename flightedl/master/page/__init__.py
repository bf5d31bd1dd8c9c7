"""The job's web page: its live status, for people.

* ``answers``: the responses at each path

The page consists of the files ``index.html``, ``page.css`` and ``page.js`` in this directory, which are served
unchanged. It has no build step and loads nothing from other places. It receives its data as server-sent events, and is
read-only.
"""
