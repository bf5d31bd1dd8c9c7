"""The commands: parse, call one function, print.

``main`` is the ``flightedl`` command. Its subcommands: ``run``, ``status``, ``events``, ``servers`` (master and
pserver), ``checkpoint``, ``dataset``, ``mode``, ``tasks``, ``certs``, ``replay``, ``forget``, ``bench`` (measures).
What they share: ``options`` and ``consoles``. ``schemas`` writes the contract files, for developers.
"""
