"""The job's web page: how it stands, live, for people.

``answers`` says what is answered at which path. The page itself is three files beside it, ``index.html``, ``page.css``
and ``page.js``, which are served as they are: there is no build step, and nothing is loaded from anywhere else. It gets
its data as server-sent events, and can order nothing.
"""
