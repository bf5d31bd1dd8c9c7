"""Bugs that a run can be given, in what the simulation models itself; see ``planted`` for those in the product."""

from __future__ import annotations

#: Name -> what goes wrong.
FLAWS: dict[str, str] = {
    "hashes are not compared": "a damaged shard file is loaded",
    "reported before it is written": "a pserver reports its file before it is in the store",
    "writes are not fenced": "a master's writes do not compare the lock",
}
