"""A job's name in an etcd that others use, too: who may start a job of this name, and what becomes of its former one.

Whoever starts the job holds its name for as long as it runs (``liveness``). A former job that is over is forgotten, one
that was stopped is resumed (``former``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from flightedl.config import Resume
from flightedl.coordination.keys import JobKeys
from flightedl.launch.programs import Programs
from flightedl.ports import Clock, Coordinator, Storage

if TYPE_CHECKING:
    from flightedl.adapters.etcd import EtcdCoordinator
    from flightedl.launch.liveness import Liveness


class JobName:
    """The name of one job.

    A job with an etcd of its own, of which it is the first job, never asks: what it takes is imported when it does.

    Args:
        job: It.
        programs: Of the job.
        clock: Measures how long leases live on.
        tell: Is told in one sentence what is waited for.
    """

    def __init__(self, job: str, programs: Programs, clock: Clock, tell: Callable[[str], None]) -> None:
        self._job = job
        self._keys = JobKeys(job)
        self._programs = programs
        self._clock = clock
        self._tell = tell

    def claim(self, stack: contextlib.ExitStack, storage: Storage | None, is_unwanted: Callable[[], bool]) -> bool:
        """Become the one who starts this job, until ``stack`` is closed; False: that is not wanted any more.

        Raises:
            UsageError: the job runs, or its former one has to be resumed in another way.
        """
        from flightedl.launch.former import forget, former_job, require_startable

        chosen = self._programs.master_settings()
        coordinator = stack.enter_context(self._coordinator())
        liveness = self._liveness(coordinator, is_unwanted)
        held = liveness.claim_name(chosen.lease_ttl_s)
        if held is None:
            return False
        stack.callback(held.release)
        former = former_job(coordinator, self._keys)
        require_startable(former, chosen.etcd, storage, resume=chosen.resume is not Resume.NEVER)
        if former is not None and former.is_over:
            # All of it is in its last checkpoint.
            liveness.require_gone(held)
            if is_unwanted():
                return False
            forget(coordinator, self._keys)
        return True

    def is_used(self) -> bool:
        """True if a job of this name was begun."""
        with self._coordinator() as coordinator:
            return coordinator.get(self._keys.job) is not None

    def free(self) -> None:
        """Forget a job whose processes have ended.

        Raises:
            UsageError: it runs.
        """
        from flightedl.launch.former import forget

        with self._coordinator() as coordinator:
            self._liveness(coordinator, lambda: False).require_gone()
            forget(coordinator, self._keys)

    def _coordinator(self) -> contextlib.closing[EtcdCoordinator]:
        from flightedl.adapters.etcd import EtcdCoordinator

        return contextlib.closing(EtcdCoordinator(self._programs.etcd(), clock=self._clock))

    def _liveness(self, coordinator: Coordinator, is_unwanted: Callable[[], bool]) -> Liveness:
        from flightedl.launch.liveness import Liveness
        from flightedl.launch.status import is_master_answering, tool_connector

        connector = tool_connector(self._programs.tls_dir)
        return Liveness(
            coordinator,
            self._keys,
            self._clock,
            lambda record: is_master_answering(record, self._job, connector),
            self._tell,
            is_unwanted,
        )
