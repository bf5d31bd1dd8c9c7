"""The wire and storage contract, for clients in any language: see README.md beside this file.

``messages.json`` holds the JSON Schema of every JSON message, ``arrow.json`` the Arrow schemas of every stream,
``keys.json`` the keys in etcd, ``golden.json`` example bytes. They are written from the code by ``make schemas``; a
test proves that both agree, so a change of the protocol is always a visible change of these files.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

NAMES = ("messages", "arrow", "keys", "golden")


def load(name: str) -> Any:
    """One of ``NAMES``, parsed."""
    return json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text("utf-8"))
