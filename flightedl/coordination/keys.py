"""Layout of a job's keys in etcd.

The keys shared by the processes of job J are under ``/flightedl/J/``, which all of these processes watch. A key that
identifies a process (``launcher``, ``master/*``, ``ps/<index>``, ``standbys/<index>``, ``trainers/<id>``,
``consumers/<name>``) is leased, and disappears with the process. Keys of the job itself are not leased.

Keys that only a master's successor reads are under ``/flightedl-state/J/``. The master writes them whenever it assigns
tasks, and etcd would otherwise send each write to every watching process.
"""

from __future__ import annotations

from flightedl.ports import Coordinator

_ALL_JOBS = "/flightedl/"


class JobKeys:
    """The keys of one job.

    Args:
        job_name: The job's name, which the settings have validated.
    """

    def __init__(self, job_name: str) -> None:
        self.job_name = job_name
        #: Prefix of all keys that the job's processes watch.
        self.prefix = prefix = f"{_ALL_JOBS}{job_name}/"
        #: Prefix of all keys that only masters read.
        self.state_prefix = state = f"/flightedl-state/{job_name}/"
        #: The etcd on which the job's state was created, and the job's life; a ``HistoryRecord``.
        self.history = f"{prefix}history"
        #: Key held by the active master. Its create_revision is the master's generation.
        self.master_lock = f"{prefix}master/lock"
        #: Address of the active master; a ``ServerRecord`` with the generation of the lock.
        self.master_address = f"{prefix}master/addr"
        #: Key held by the process that launched the job (``flightedl run``); a ``ServerRecord`` without an address.
        self.launcher = f"{prefix}launcher"
        #: Number of the job's pservers, in decimal.
        self.ps_desired = f"{prefix}ps_desired"
        #: Prefix of all pservers.
        self.pservers = f"{prefix}ps/"
        #: Prefix of all standby pservers.
        self.standbys = f"{prefix}standbys/"
        #: Prefix of all trainers.
        self.trainers = f"{prefix}trainers/"
        #: Prefix of the names of consumers, which follow the model.
        self.consumers = f"{prefix}consumers/"
        #: Prefix of what the consumers have acknowledged.
        self.acknowledged = f"{prefix}acknowledged/"
        #: The declaration: parameters, dataset, mode.
        self.job = f"{prefix}job"
        #: The newest ``Placement``; absent if it is the one in the declaration.
        self.placement = f"{prefix}placement"
        #: The ``Intent`` to move blocks; its create_revision is the attempt.
        self.moving = f"{prefix}moving"
        #: The trainer that initializes the parameters, and whether it has done so.
        self.init_params = f"{prefix}init_params"
        #: Prefix of names that only one trainer can claim.
        self.once = f"{prefix}once/"
        #: The newest complete checkpoint.
        self.checkpoint_latest = f"{prefix}checkpoint/latest"
        #: State of the task queue. Only the master writes this key and the keys that follow.
        self.task_queues = f"{state}task_queues"
        #: Quarantined tasks. They change rarely, whereas ``task_queues`` changes with every assignment.
        self.task_failures = f"{state}task_failures"
        #: Prefix of the records of files that were added to a followed dataset.
        self.arrivals = f"{state}arrivals/"
        #: A ``StopRecord``, written when a trainer ends the job before all data has been trained on.
        self.stopped = f"{state}stopped"
        #: A ``GroupRecord`` with the current start of the group of ranks that consumes the data.
        self.group = f"{state}group"
        #: The evaluations, with their queues and sums.
        self.evaluations = f"{state}evaluations"
        #: A ``ScaleRecord``: the most recent change of the pservers.
        self.scaling = f"{state}scaling"
        #: The membership view.
        self.membership = f"{state}membership"
        #: The pserver processes that the queue's state relies on. Written together with the queue.
        self.pserver_recovery = f"{state}pserver_recovery"

    @property
    def of_state(self) -> dict[str, str]:
        """Keys of the state that a new master reads, by the names that ``domain.master`` uses for their values."""
        return {
            "declaration": self.job,
            "queue": self.task_queues,
            "failures": self.task_failures,
            "evaluations": self.evaluations,
            "membership": self.membership,
            "recovery": self.pserver_recovery,
            "checkpoints": self.checkpoint_latest,
            "stopped": self.stopped,
            "group": self.group,
            "scaling": self.scaling,
            "desired": self.ps_desired,
        }

    def pserver(self, index: int) -> str:
        """Key held by the pserver with this index; a ``ServerRecord``."""
        return f"{self.pservers}{index}"

    def pserver_index(self, key: str) -> int | None:
        """Return the index in a pserver's key, or None for other keys."""
        return _index_after(self.pservers, key)

    def standby(self, index: int) -> str:
        """Key held by the standby of the pserver with this index; a ``ServerRecord``."""
        return f"{self.standbys}{index}"

    def standby_index(self, key: str) -> int | None:
        """Return the index in a standby's key, or None for other keys."""
        return _index_after(self.standbys, key)

    def trainer(self, trainer: str) -> str:
        """Key held by this trainer; a ``TrainerRecord``."""
        return self.trainers + trainer

    def trainer_id(self, key: str) -> str | None:
        """Return the id in a trainer's key, or None for other keys."""
        text = key.removeprefix(self.trainers)
        return text if text and text != key else None

    def consumer(self, name: str) -> str:
        """Key held by the consumer with this name; a ``ServerRecord`` without an address."""
        return self.consumers + name

    def consumer_name(self, key: str) -> str | None:
        """Return the name in a consumer's key, or None for other keys."""
        text = key.removeprefix(self.consumers)
        return text if text and text != key else None

    def acknowledgement(self, name: str, index: int) -> str:
        """Key of this consumer's ``Acknowledgement`` to the pserver with this index. It has the consumer's lease."""
        return f"{self.acknowledged}{name}/{index}"

    def arrival(self, number: int) -> str:
        """Key of an ``ArrivalRecord``, written once, together with the queue that contains the arrival's tasks."""
        return f"{self.arrivals}{number:08d}"

    def save(self, url: str) -> str:
        """Key of the trainers' most recent request to write the model to this URL."""
        return f"{self.prefix}saves/{url}"


def _index_after(prefix: str, key: str) -> int | None:
    text = key.removeprefix(prefix)
    is_index = text != key and text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")
    return int(text) if is_index else None


def jobs_in(coordinator: Coordinator) -> list[str]:
    """Return the names of all jobs that have keys."""
    keys = [entry.key for entry in coordinator.list(_ALL_JOBS).entries]
    return sorted({key.removeprefix(_ALL_JOBS).partition("/")[0] for key in keys})
