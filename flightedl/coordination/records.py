"""Values of keys that identify processes, and of the key that names the job's life.

The values are JSON. Unknown fields are ignored, so that processes of a newer version can join. When the entry of a
pserver or trainer is read, ``generation`` is set to the create_revision of its key. The master's record contains the
generation of the lock, which is another key.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]
#: Version of the protocol in ``schemas/``, whose page says what may change within a version.
PROTOCOL = 1


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Address and identity of a master or a pserver."""

    #: ``host:port``
    address: str
    generation: Natural = 0
    #: The process's host, for people.
    name: str = ""
    pid: Natural = 0
    #: Policy for checksums of values; see ``rpc.integrity``.
    integrity: str = "auto"
    #: Version of the protocol, for clients in other languages.
    protocol: Natural = PROTOCOL
    #: Name that the launcher gave to the process, such as "pserver-3"; empty if there is none.
    process: str = ""
    #: True for a master whose job returns all pservers to one checkpoint, so that copies by standbys are useless.
    refuses_standbys: bool = False


class TrainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live trainer."""

    id: str
    generation: Natural = 0
    #: Readable name that the launcher gave to the process; empty if there is none.
    name: str = ""
    host: str = ""
    pid: Natural = 0


class HistoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The etcd on which the job's state was created, and the job's life."""

    #: Number of the job's life (see ``domain.recovery.store_history``).
    life: Natural = 0
    #: Id of etcd's cluster, as 16 hexadecimal digits.
    cluster: str = ""
