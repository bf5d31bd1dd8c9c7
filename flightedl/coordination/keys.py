"""The layout of a job's keys in etcd, in one place.

What the processes of job J have to know of each other lies under ``/flightedl/J/``, which all of them watch. Keys that
name a process (``launcher``, ``master/*``, ``ps/<index>``, ``trainers/<id>``) are leased and vanish with it; facts of
the whole job are not leased.

What only a master's successor reads lies under ``/flightedl-state/J/``: it is written at every dispatch, and would
otherwise be sent by etcd to everybody who watches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one job.

    Attributes:
        job_name: The job's name, already validated by the settings.
    """

    job_name: str

    @property
    def prefix(self) -> str:
        """All keys of the job that its processes watch start with it."""
        return f"/flightedl/{self.job_name}/"

    @property
    def state_prefix(self) -> str:
        """All keys of the job that only masters read start with it."""
        return f"/flightedl-state/{self.job_name}/"

    @property
    def of_state(self) -> dict[str, str]:
        """The keys of what a master goes on from, by the names that ``domain.master`` gives its values."""
        return {
            "declaration": self.job,
            "queue": self.task_queues,
            "failures": self.task_failures,
            "evaluations": self.evaluations,
            "membership": self.membership,
            "recovery": self.pserver_recovery,
            "checkpoints": self.checkpoint_latest,
            "stopped": self.stopped,
        }

    @property
    def history(self) -> str:
        """On which etcd the job's state was begun, and in which life of the job; a ``HistoryRecord``."""
        return self.prefix + "history"

    @property
    def master_lock(self) -> str:
        """Held by the active master; its create_revision is the master's generation."""
        return self.prefix + "master/lock"

    @property
    def master_address(self) -> str:
        """A ``ServerRecord`` that carries the lock's generation."""
        return self.prefix + "master/addr"

    @property
    def launcher(self) -> str:
        """Held by whoever starts the whole job (``flightedl run``); a ``ServerRecord`` without an address."""
        return self.prefix + "launcher"

    @property
    def ps_desired(self) -> str:
        """How many pservers the job has, in decimal."""
        return self.prefix + "ps_desired"

    @property
    def pservers(self) -> str:
        """Prefix of all pservers."""
        return self.prefix + "ps/"

    def pserver(self, index: int) -> str:
        """Held by the pserver of this index; a ``ServerRecord``."""
        return f"{self.pservers}{index}"

    def pserver_index(self, key: str) -> int | None:
        """The index that a pserver's key names; None for any other key."""
        text = key.removeprefix(self.pservers)
        is_index = text != key and text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")
        return int(text) if is_index else None

    @property
    def trainers(self) -> str:
        """Prefix of all trainers."""
        return self.prefix + "trainers/"

    def trainer(self, trainer: str) -> str:
        """Held by this trainer; a ``TrainerRecord``."""
        return self.trainers + trainer

    def trainer_id(self, key: str) -> str | None:
        """The id that a trainer's key names; None for any other key."""
        text = key.removeprefix(self.trainers)
        return text if text and text != key else None

    @property
    def job(self) -> str:
        """The declaration: parameters, dataset, mode."""
        return self.prefix + "job"

    @property
    def init_params(self) -> str:
        """Key that names the trainer which gives the parameters their first values, and says when it is done."""
        return self.prefix + "init_params"

    @property
    def task_queues(self) -> str:
        """The queue's state, written by the master only."""
        return f"{self.state_prefix}task_queues"

    @property
    def task_failures(self) -> str:
        """Key of the quarantined tasks. It changes rarely, while ``task_queues`` changes with every dispatch."""
        return f"{self.state_prefix}task_failures"

    @property
    def arrivals(self) -> str:
        """Prefix of the files that joined a followed dataset."""
        return f"{self.state_prefix}arrivals/"

    def arrival(self, number: int) -> str:
        """An ``ArrivalRecord``, written once, by the master, together with the queue that has its tasks."""
        return f"{self.arrivals}{number:08d}"

    @property
    def stopped(self) -> str:
        """A ``StopRecord``, written when a trainer ends the job before all of its data has been trained."""
        return f"{self.state_prefix}stopped"

    @property
    def evaluations(self) -> str:
        """Key of the evaluations, with their queues and sums. Only the master writes it."""
        return f"{self.state_prefix}evaluations"

    @property
    def membership(self) -> str:
        """The membership view, written by the master only."""
        return f"{self.state_prefix}membership"

    @property
    def pserver_recovery(self) -> str:
        """Which process of each pserver is taken into the queue's account; written together with the queue."""
        return f"{self.state_prefix}pserver_recovery"

    def checkpoint(self, index: int) -> str:
        """Key of the checkpoint that the pserver of this index stored last."""
        return f"{self.prefix}checkpoints/{index}"

    def save(self, url: str) -> str:
        """The newest request of trainers to write the model to this URL."""
        return f"{self.prefix}saves/{url}"

    @property
    def once(self) -> str:
        """Prefix of the names that exactly one trainer gets."""
        return self.prefix + "once/"

    @property
    def checkpoint_latest(self) -> str:
        """The newest complete checkpoint."""
        return self.prefix + "checkpoint/latest"
