"""Generators of files in this repository, for its developers. They are not installed.

* ``schemas``: the protocol's schemas in ``schemas/``
* ``manifests``: the kustomize manifests in ``deploy/``, one of which is ``one_pod``, a complete job in one pod
* ``site``: the documentation site
"""
