"""The values of the keys that name processes, and of the one that says which life of the job this is.

JSON; unknown fields are ignored, so that processes of a newer version may join. ``generation`` of a pserver and of a
trainer is the create_revision of its own key and is filled in by who reads the entry; the master's address carries the
generation of the lock, which is another key.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Address and identity of a master or a pserver."""

    #: ``host:port``
    address: str
    generation: Natural = 0
    #: For people: which process this is.
    name: str = ""
    pid: Natural = 0
    #: Whether it wants values with checksums, see ``rpc.integrity``.
    integrity: str = "auto"


class TrainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live trainer."""

    id: str
    generation: Natural = 0
    #: For people: what its launcher calls it; empty: nobody does.
    name: str = ""
    host: str = ""
    pid: Natural = 0


class HistoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """On which etcd the job's state was begun."""

    #: Revisions of this life count from here, see ``domain.recovery.store_history``.
    life: Natural = 0
    #: The id of etcd's cluster, 16 hex digits.
    cluster: str = ""
