"""A trainer's steps and row lookups, on one stream.

* ``conversation``: the stream's requests, one after the other
* ``line_loop``: the thread that serves small steps on all Unix sockets
* ``session``: processing of a step, and delivery of values when their rounds close
* ``step_stream``: transport of a conversation's messages on TCP, shared memory and a Unix socket

A step's path: ``conversation`` receives its first message from the ``step_stream``, and passes each message's parts to
a ``session``. If the steps are small, ``line_loop`` does this. The last answer contains the values of closed rounds.
"""
