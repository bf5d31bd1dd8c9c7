"""Which certificates the members of a job have; made by ``adapters.certificates``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flightedl.errors import UsageError
from flightedl.rpc.authentication import SERVER_NAME, Role, name_in_certificate

if TYPE_CHECKING:
    from flightedl.adapters.certificates import Member

#: Names, IPv4 and IPv6 addresses; a certificate's first label may be ``*``.
_HOST = re.compile(r"(\*\.)?[\w:]([\w.:-]{0,251}[\w:])?", re.ASCII)
#: Beside the roles: for an etcd of the job's own. It proves nothing to masters and pservers.
ETCD = "etcd"


def members(job: str, etcd_hosts: Sequence[str]) -> list[Member]:
    """One for each role, and one for etcd at these names and addresses beside loopback's.

    Raises:
        UsageError: a host has characters that no name or address has.
    """
    from flightedl.adapters.certificates import Member

    for host in etcd_hosts:
        if not _HOST.fullmatch(host):
            raise UsageError(f"{host!r:.80} is neither the name nor the address of a host (--host)")
    hosts = {Role.SERVER: (SERVER_NAME,)}
    roles = [Member(role, name_in_certificate(job, role), hosts.get(role, ())) for role in Role]
    return [*roles, Member(ETCD, "", ("localhost", "127.0.0.1", *etcd_hosts))]
