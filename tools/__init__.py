"""The commands. Each of them parses its arguments, calls one function, and prints the result.

``main`` is the ``flightedl`` command. Its subcommands:

* ``run``, ``servers``, ``data``: start a job, a server, or a master for ranks that another launcher starts
* ``status``, ``top``, ``events``, ``plot``, ``doctor`` (with ``report``): inspect a job
* ``model``, ``follow`` (with ``serve``): read, copy or serve a job's model
* ``table``: import and export rows of tables
* ``checkpoint``, ``dataset``, ``mode``, ``tasks``, ``forget``: administer a job's state or data
* ``certs``, ``replay``, ``prove``, ``bench``: create certificates, replay recordings, prove scripts, run benchmarks
* ``scaling``: change the number of a job's trainers or pservers
* ``submit`` (with ``pods``, its pod options), ``clusters`` (jobs, logs, scale trainers, cancel), ``autoscale``: jobs on
  Kubernetes

Shared modules: ``lazy`` (groups of commands), ``options``, ``running`` (access to a job), ``consoles`` and
``documents`` (YAML). ``generators`` write files of this repository, and are not installed.
"""
