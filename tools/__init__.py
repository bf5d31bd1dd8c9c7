"""The commands. Each parses its arguments, calls one function, and prints the result.

``main`` is the ``flightedl`` command. Its subcommands:

* ``run``, ``servers``, ``data``: commands that start a job, a server, or a master for ranks of another launcher
* ``status``, ``top``, ``events``, ``plot``, ``model``, ``doctor`` (with ``report``): commands that inspect a job
* ``checkpoint``, ``dataset``, ``mode``, ``tasks``, ``forget``: commands that administer a job's state or data
* ``certs``, ``replay``, ``bench``: commands for certificates, recordings and benchmarks
* ``submit`` (with ``pods``, its pod options), ``clusters`` (jobs, logs, scale, cancel), ``autoscale``: jobs on
  Kubernetes

Shared modules are ``lazy`` (command groups), ``options``, ``running`` (access to a job), ``consoles`` and ``documents``
(YAML). For developers, ``schemas`` writes the protocol's schemas, ``manifests`` the manifests in ``deploy/``, and
``site`` the documentation site.
"""
