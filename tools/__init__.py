"""The commands: parse, call one function, print.

``main`` is the ``flightedl`` command. Its subcommands: ``run``, ``status``, ``top``, ``events``, ``plot``, ``doctor``
(with a ``report``), ``servers`` (master and pserver), ``checkpoint``, ``dataset``, ``mode``, ``tasks``, ``certs``,
``replay``, ``forget``, ``bench`` (measures), ``submit`` (with ``pods``, the options that describe its pods) and
``clusters`` (jobs, logs, scale, cancel), ``autoscale``. What they share: ``lazy`` groups, ``options``, ``running``
(access to a job), ``consoles`` and ``documents`` (YAML). For developers: ``schemas`` writes the contract files,
``manifests`` the manifests in ``deploy/``.
"""
