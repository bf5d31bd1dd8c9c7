"""The commands: parse, call one function, print.

``main`` is the ``flightedl`` command. Its subcommands:

* ``run``, ``servers``, ``data``: a job; a master or pserver; a master for ranks started by another launcher
* ``status``, ``top``, ``events``, ``plot``, ``doctor`` (with ``report``): inspect a job
* ``checkpoint``, ``dataset``, ``mode``, ``tasks``, ``forget``: administer a job's state
* ``certs``, ``replay``, ``bench``: certificates, recordings, benchmarks
* ``submit`` (with ``pods``, its pod options), ``clusters`` (jobs, logs, scale, cancel), ``autoscale``: Kubernetes

Shared: ``lazy`` groups, ``options``, ``running`` (access to a job), ``consoles``, ``documents`` (YAML). For developers:
``schemas`` writes the contract files, ``manifests`` the manifests in ``deploy/``, ``site`` the documentation as a site.
"""
