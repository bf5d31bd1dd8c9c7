"""Processes of a job on this machine: their settings, their environments, their commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.config import (
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
from flightedl.launch.policy import Role, Slot
from flightedl.launch.processes import Child, Children, OnLines
from flightedl.launch.supervisor import Starter

_Settings = TypeVar("_Settings", bound=CommonSettings)
_KINDS = (MasterSettings, PserverSettings, TrainerSettings)


@dataclass(frozen=True, slots=True)
class TrainerProgram:
    """Program that the trainers of a job run."""

    #: Path of a script or dotted name of a module.
    target: str
    arguments: tuple[str, ...] = ()
    count: int = 1
    #: Receives their output.
    on_lines: OnLines | None = None


class Programs:
    """The programs of one job.

    Args:
        job: Its name.
        pservers: How many.
        checkpoint: URL for checkpoints; None: none are kept.
        etcd: ``host:port`` of one that is there; None: the job has one of its own.
        trainers: None: no trainers.
        page_port: Where the master serves the job's page and its figures; 0: nowhere.
        standby: Whether one more master and one more pserver are started.
        more: Further settings, each for the processes that have it.

    Raises:
        UsageError: a setting is wrong, or there is no such setting.
    """

    def __init__(
        self,
        job: str,
        pservers: int,
        checkpoint: str | None,
        etcd: str | None,
        trainers: TrainerProgram | None,
        *,
        standby: bool,
        page_port: int = 0,
        more: Mapping[str, Any],
    ) -> None:
        if not isinstance(pservers, int) or pservers < 0:
            raise UsageError(f"pservers is {pservers!r:.80}, but must be how many parameter servers there are, or 0")
        if trainers is not None and trainers.count < 1:
            raise UsageError(f"trainers is {trainers.count}, but a job needs at least one trainer")
        self._job = job
        self._pservers = pservers
        self._checkpoint = checkpoint
        self._has_own_etcd = etcd is None
        #: Known once there is one.
        self.etcd_address = etcd
        self._trainers = trainers
        self._standby = standby
        self._page_port = page_port
        self._more = more
        if unknown := sorted(more.keys() - set().union(*map(_names_of, _KINDS))):
            raise UsageError(f"there is no setting named {', '.join(unknown)}")
        for kind in _KINDS:
            checkpoints = {"checkpoint": checkpoint} if "checkpoint" in _names_of(kind) else {}
            settings(kind, **{"job": job, "etcd": etcd, **checkpoints, **self.more_of(kind)})

    def more_of(self, kind: type[CommonSettings]) -> dict[str, Any]:
        """The further settings that processes of a kind have."""
        return {name: value for name, value in self._more.items() if name in _names_of(kind)}

    def settings(self, kind: type[_Settings], **own: Any) -> _Settings:
        """All settings of a kind of process; ``own``: its own ones."""
        more = self.more_of(kind)
        if self._has_own_etcd:
            # One of its own is on loopback, and wants no proof.
            more |= dict.fromkeys(("etcd_tls_dir", "etcd_user", "etcd_password_file"), "")
        return settings(kind, **{"etcd": self.etcd_address, "job": self._job, **own, **more})

    def master_settings(self, **own: Any) -> MasterSettings:
        """Return the master's settings."""
        return self.settings(MasterSettings, checkpoint=self._checkpoint, **own)

    @property
    def tls_dir(self) -> str:
        """Directory with the certificates of the tools. Empty without TLS."""
        return self.settings(CommonSettings).tls_dir

    def etcd(self) -> EtcdAccess:
        """How the job's etcd is reached."""
        return EtcdAccess.of(self.settings(CommonSettings))

    @property
    def trainer_count(self) -> int:
        """How many trainers are started."""
        return 0 if self._trainers is None else self._trainers.count

    def starters(self, children: Children, directory: Path, forks: ForkServer) -> dict[Slot, Starter]:
        """Return what starts each process but etcd. Results go to ``directory``.

        In this order they are there soonest: what the first ones import is needed by all, pservers load a compiler.
        """
        # Ports are always free ones: a fixed one from the environment could serve only one of the processes.
        ports = {"port": 0, "metrics_port": 0, "health_port": 0}
        master_ports = ports | {"metrics_port": self._page_port}
        master = self.master_settings(pservers=self._pservers, trainers=self.trainer_count, **master_ports)
        pserver = self.settings(PserverSettings, checkpoint=self._checkpoint, **ports)
        pservers = self._pservers + (1 if self._standby and self._pservers else 0)
        cores = available_cores()
        environments = {
            Role.MASTER: child_environment(master, **thread_environment(cores, cores)),
            Role.PSERVER: child_environment(pserver, **thread_environment(max(self._pservers, 1), cores)),
        }

        def servers(role: Role, count: int) -> dict[Slot, Starter]:
            program = [f"flightedl.{role}"]
            return {
                slot: _starter(children, forks, slot, program, environments[role])
                for slot in (Slot(role, index) for index in range(count))
            }

        masters = servers(Role.MASTER, 2 if self._standby else 1)
        if self._trainers is not None:
            masters |= self._trainer_starters(self._trainers, children, directory, forks)
        return masters | servers(Role.PSERVER, pservers)

    def _trainer_starters(
        self, trainers: TrainerProgram, children: Children, directory: Path, forks: ForkServer
    ) -> dict[Slot, Starter]:
        threads = thread_environment(trainers.count, available_cores())
        program = ["flightedl.launch.trainer", trainers.target, *trainers.arguments]
        found: dict[Slot, Starter] = {}
        for index in range(trainers.count):
            slot = Slot(Role.TRAINER, index)
            own = {"output_dir": str(directory), "process_name": str(slot), "metrics_port": 0}
            chosen = self.settings(TrainerSettings, **own)
            environment = child_environment(chosen, **threads)
            found[slot] = _starter(children, forks, slot, program, environment, trainers.on_lines)
        return found


def _names_of(kind: type[CommonSettings]) -> set[str]:
    return {field.name for field in fields(kind)}


def _starter(
    children: Children,
    forks: ForkServer,
    slot: Slot,
    module_and_arguments: Sequence[str],
    environment: Mapping[str, str],
    on_lines: OnLines | None = None,
) -> Starter:
    name = str(slot)

    def start(_count: int) -> Child:
        module, *arguments = module_and_arguments
        forked = forks.start(slot.role, module, arguments, environment)
        if forked is not None:
            return children.take(name, forked, on_lines=on_lines)
        return children.start(name, [sys.executable, "-m", *module_and_arguments], environment, on_lines=on_lines)

    return start
