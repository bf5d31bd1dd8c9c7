"""Documentation site: ``make docs`` builds it in ``site/``.

* ``pages``: order of the pages, and their adaptation for the site
* ``reference``: reference sections generated from docstrings, commands and settings
* ``build``: the Sphinx build

Sphinx is used because MyST reads Markdown in the same way as GitHub, and because the theme furo has a dark and a light
mode and loads no resources from other hosts.
"""
