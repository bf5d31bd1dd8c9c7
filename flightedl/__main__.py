"""``python -m flightedl``: the ``flightedl`` command."""

from __future__ import annotations

import importlib

importlib.import_module("flightedl_tools.main").main()
