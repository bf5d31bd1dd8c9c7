"""Users of an etcd for tests, each with access only to the keys of one job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import etcd3.etcdrpc as rpc
from etcd3.etcdrpc.auth_pb2 import Permission

from flightedl.coordination.keys import JobKeys
from tests.support.etcd_server import EtcdServer

TIMEOUT_S = 5.0


def enable(server: EtcdServer, users: Mapping[str, Iterable[str]], password: str) -> None:
    """Admit only these users (names by job) from now on, by their certificates or this password."""
    channel = server.access.channel(server.address, TIMEOUT_S)
    auth = rpc.AuthStub(channel)
    auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="root"), timeout=TIMEOUT_S)
    auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"), timeout=TIMEOUT_S)
    for job, names in users.items():
        auth.RoleAdd(rpc.AuthRoleAddRequest(name=job), timeout=TIMEOUT_S)
        for prefix in (JobKeys(job).prefix, JobKeys(job).state_prefix):
            end = prefix[:-1].encode() + b"0"
            full = Permission(permType=Permission.READWRITE, key=prefix.encode(), range_end=end)
            auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name=job, perm=full), timeout=TIMEOUT_S)
        for name in names:
            auth.UserAdd(rpc.AuthUserAddRequest(name=name, password=password), timeout=TIMEOUT_S)
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=job), timeout=TIMEOUT_S)
    auth.AuthEnable(rpc.AuthEnableRequest(), timeout=TIMEOUT_S)
    channel.close()
