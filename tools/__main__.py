"""``python -m flightedl_tools``: the ``flightedl`` command."""

from __future__ import annotations

from .main import main

main()
