"""The values of the keys that name processes, and of the key that names the job's life.

JSON; unknown fields are ignored, so that processes of a newer version may join. The reader of an entry fills in the
``generation`` of a pserver or trainer: it is the create_revision of its own key. The master's address carries the
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
    #: The process's host, for people.
    name: str = ""
    pid: Natural = 0
    #: Setting of checksums of values, see ``rpc.integrity``.
    integrity: str = "auto"


class TrainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live trainer."""

    id: str
    generation: Natural = 0
    #: Its launcher's name for it, for people; empty if it has none.
    name: str = ""
    host: str = ""
    pid: Natural = 0


class HistoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The etcd on which the job's state was begun, and the job's life."""

    #: Number of the life, see ``domain.recovery.store_history``.
    life: Natural = 0
    #: The id of etcd's cluster, 16 hex digits.
    cluster: str = ""
