"""Documentation site, which ``make docs`` builds in ``site/``.

* ``pages``: the order of the pages, and their adaptation for the site
* ``reference``: sections generated from docstrings, commands and settings
* ``build``: the Sphinx build

Sphinx is used because MyST reads Markdown in the same way as GitHub, and because the theme furo has a dark and a light
mode and loads nothing from other hosts.
"""
