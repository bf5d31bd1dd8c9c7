"""Creates the certificates of a job's members, with ``adapters.certificates``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flightedl.errors import UsageError
from flightedl.rpc.authentication import SERVER_NAME, Role, name_in_certificate

if TYPE_CHECKING:
    from flightedl.adapters.certificates import Member

#: Host names, IPv4 addresses and IPv6 addresses. The first label of a host name may be ``*``.
_HOST = re.compile(r"(\*\.)?[\w:]([\w.:-]{0,251}[\w:])?", re.ASCII)
#: Role in the certificate of a job's own etcd. Masters and pservers reject certificates with this role.
ETCD = "etcd"


def members(job: str, etcd_hosts: Sequence[str]) -> list[Member]:
    """Return a member for each role and for etcd. All are valid for these names and addresses, and for loopback.

    Raises:
        UsageError: a host contains characters that are not allowed in names and addresses.
    """
    from flightedl.adapters.certificates import Member

    for host in etcd_hosts:
        if not _HOST.fullmatch(host):
            raise UsageError(f"{host!r:.80} is neither the name nor the address of a host (--host)")
    hosts = {Role.SERVER: (SERVER_NAME,)}
    roles = [Member(role, name_in_certificate(job, role), hosts.get(role, ())) for role in Role]
    return [*roles, Member(ETCD, "", ("localhost", "127.0.0.1", "::1", *etcd_hosts))]
