"""Settings, environments and commands of a job's processes on this machine."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from flightedl.config import (
    ENVIRONMENT_PREFIX,
    LOOPBACK,
    CommonSettings,
    MasterSettings,
    PserverSettings,
    TrainerSettings,
    available_cores,
    child_environment,
    settings,
    thread_environment,
)
from flightedl.errors import UsageError
from flightedl.launch.forking import ForkServer
from flightedl.launch.places import free_ports
from flightedl.launch.policy import Role, Slot
from flightedl.launch.processes import Child, Children, OnLines
from flightedl.launch.supervisor import Starter

_Settings = TypeVar("_Settings", bound=CommonSettings)
_KINDS = (MasterSettings, PserverSettings, TrainerSettings)


@dataclass(frozen=True, slots=True)
class TrainerProgram:
    """The program that each of a job's trainers runs."""

    #: Path of a script, or dotted name of a module.
    target: str
    arguments: tuple[str, ...] = ()
    count: int = 1
    #: Receives their output.
    on_lines: OnLines | None = None
    #: True if the trainers are the ranks of a group, which get ``RANK``, ``WORLD_SIZE`` and so on, as from torchrun.
    is_group: bool = False


@dataclass(slots=True)
class Programs:
    """The programs of one job. Raises UsageError if a setting is invalid or unknown."""

    job: str
    #: Number of pservers.
    pservers: int
    #: URL for checkpoints; None to write none.
    checkpoint: str | None
    #: ``host:port`` of a running etcd. If it is None, the job gets its own etcd, whose address is then stored here.
    etcd_address: str | None
    trainers: TrainerProgram | None
    #: True to start an additional master and an additional pserver.
    standby: bool
    #: Port of the job's page on the master; 0 for no page.
    page_port: int = 0
    #: Number of pserver processes that follow a pserver, and take over its blocks if it dies.
    standby_pservers: int = 0
    #: More settings. Each of them applies to the kinds of processes that support it.
    more: Mapping[str, Any] = field(default_factory=dict)
    has_own_etcd: bool = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.pservers, int) or self.pservers < 0:
            raise UsageError(
                f"pservers is {self.pservers!r:.80}, but must be the number of parameter servers, 0 or more"
            )
        if not isinstance(self.standby_pservers, int) or self.standby_pservers < 0:
            raise UsageError(f"standby_pservers is {self.standby_pservers!r:.80}, but must be a number, 0 or more")
        if self.standby_pservers and self.more.get("recovery") == "rollback":
            raise UsageError(
                "standby pservers cannot be used with the recovery rollback, which resets all pservers to one "
                'checkpoint: omit standby_pservers (--standby-pservers), or use the recovery "replay"'
            )
        if self.trainers is not None and self.trainers.count < 1:
            raise UsageError(f"trainers is {self.trainers.count}, but a job needs at least one trainer")
        self.has_own_etcd = self.etcd_address is None
        if unknown := sorted(self.more.keys() - set().union(*map(_names_of, _KINDS))):
            raise UsageError(f"there is no setting named {', '.join(unknown)}")
        for kind in _KINDS:
            checkpoints = {"checkpoint": self.checkpoint} if "checkpoint" in _names_of(kind) else {}
            settings(kind, **{"job": self.job, "etcd": self.etcd_address, **checkpoints, **self.more_of(kind)})

    def more_of(self, kind: type[CommonSettings]) -> dict[str, Any]:
        """Return the additional settings that a kind of process supports."""
        return {name: value for name, value in self.more.items() if name in _names_of(kind)}

    def settings(self, kind: type[_Settings], **own: Any) -> _Settings:
        """Return all settings for a kind of process. ``own`` contains settings of a single process."""
        # The launcher watches for notices, and then stops all processes in order.
        more = self.more_of(kind) | {"notice": ""}
        if self.has_own_etcd:
            # The job's own etcd listens only on loopback, and needs no authentication.
            more |= dict.fromkeys(("etcd_tls_dir", "etcd_user", "etcd_password_file"), "")
        return settings(kind, **{"etcd": self.etcd_address, "job": self.job, **own, **more})

    def master_settings(self, **own: Any) -> MasterSettings:
        return self.settings(MasterSettings, checkpoint=self.checkpoint, **own)

    @property
    def common(self) -> CommonSettings:
        """Return the settings of a tool that examines the job."""
        return self.settings(CommonSettings)

    @property
    def trainer_count(self) -> int:
        return 0 if self.trainers is None else self.trainers.count

    @property
    def spare_pservers(self) -> int:
        """Number of pserver processes in addition to those that have an index."""
        return max(int(self.standby), self.standby_pservers) if self.pservers else 0

    @property
    def has_group(self) -> bool:
        return self.trainers is not None and self.trainers.is_group

    def starters(self, children: Children, directory: Path, forks: ForkServer) -> dict[Slot, Starter]:
        """Return a starter for every process except etcd. Results are written to ``directory``.

        Masters come first, because all processes need their imports; pservers come last, because they load a compiler.
        """
        # Always use free ports, because only one of the processes could use a fixed port from the environment.
        ports = {"port": 0, "metrics_port": 0, "health_port": 0}
        master_ports = ports | {"metrics_port": self.page_port}
        master = self.master_settings(pservers=self.pservers, trainers=self.trainer_count, **master_ports)
        cores = available_cores()
        found: dict[Slot, Starter] = {}

        def add(
            slot: Slot, program: Sequence[str], chosen: CommonSettings, sharing: int, starts: _GroupStarts | None = None
        ) -> None:
            environment = child_environment(chosen, **thread_environment(sharing, cores))
            on_lines = self.trainers.on_lines if self.trainers and slot.role is Role.TRAINER else None
            found[slot] = _starter(children, forks, slot, program, environment, on_lines, starts)

        group = _GroupStarts(self.trainer_count) if self.has_group else None
        for index in range(2 if self.standby else 1):
            # A master does little computation, so one thread per library is enough.
            add(Slot(Role.MASTER, index), ["flightedl.master"], master, cores)
        for index in range(self.trainer_count):
            assert self.trainers is not None, "it counts them"
            slot = Slot(Role.TRAINER, index)
            own = {"output_dir": str(directory), "process_name": str(slot), "metrics_port": 0}
            program = ["flightedl.launch.trainer", self.trainers.target, *self.trainers.arguments]
            add(slot, program, self.settings(TrainerSettings, **own), self.trainers.count, group)
        for index in range(self.pservers + self.spare_pservers):
            slot = Slot(Role.PSERVER, index)
            found[slot] = self.pserver_starter(children, forks, slot, self.pservers)
        return found

    def pserver_starter(self, children: Children, forks: ForkServer, slot: Slot, pservers: int) -> Starter:
        """Return the starter of a pserver that shares the cores with the other pservers (``pservers`` in total)."""
        own = {"checkpoint": self.checkpoint, "standby": self.standby_pservers > 0, "process_name": str(slot)}
        chosen = self.settings(PserverSettings, port=0, metrics_port=0, health_port=0, **own)
        environment = child_environment(chosen, **thread_environment(max(pservers, 1), available_cores()))
        return _starter(children, forks, slot, ["flightedl.pserver"], environment, None, None)


class _GroupStarts:
    """Environment variables of a group's ranks, for each start of the group."""

    def __init__(self, size: int) -> None:
        self._size = size
        #: Identifies this launcher in the names of the group's starts.
        self._name = uuid.uuid4().hex[:12]
        #: The latest start, and its port.
        self._port = 0, 0

    def variables(self, rank: int, start: int) -> dict[str, str]:
        """Return the variables of a rank for one start. Starts are counted from 1."""
        if self._port[0] != start:
            self._port = start, free_ports(1)[0]
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._port[1]),
            f"{ENVIRONMENT_PREFIX}START": f"{self._name}-{start}",
        }


def _names_of(kind: type[CommonSettings]) -> set[str]:
    return {field.name for field in fields(kind)}


def _starter(
    children: Children,
    forks: ForkServer,
    slot: Slot,
    program: Sequence[str],
    environment: Mapping[str, str],
    on_lines: OnLines | None,
    group: _GroupStarts | None,
) -> Starter:
    def start(count: int) -> Child:
        variables = environment if group is None else {**environment, **group.variables(slot.index, count)}
        forked = forks.start(slot.role, program[0], program[1:], variables)
        if forked is not None:
            return children.adopt(str(slot), forked, on_lines=on_lines)
        return children.start(str(slot), [sys.executable, "-m", *program], variables, on_lines=on_lines)

    return start
