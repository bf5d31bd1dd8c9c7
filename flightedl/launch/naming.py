"""Claims the name of a job in an etcd that several jobs share.

The process that starts a job holds the job's name until the job ends (``liveness``). An earlier job with this name is
forgotten if it has finished, and resumed if it was stopped (``former``).

A job with its own etcd need not claim its name, so ``cluster`` imports this module lazily.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from flightedl.config import CommonSettings, MasterSettings, Resume
from flightedl.coordination.coordinators import open_coordinator
from flightedl.coordination.keys import JobKeys
from flightedl.launch.former import forget, former_job, mark_resumed, require_startable
from flightedl.launch.liveness import Liveness
from flightedl.launch.status import is_master_answering, tool_connector
from flightedl.ports import Clock, Storage

Say = Callable[[str], None]


@contextlib.contextmanager
def liveness_of(
    chosen: CommonSettings, clock: Clock, say: Say, is_unwanted: Callable[[], bool] = lambda: False
) -> Iterator[Liveness]:
    """Connect to the etcd in the settings in order to examine their job. Takes the same arguments as ``Liveness``."""
    connector = tool_connector(chosen.tls_dir)
    with contextlib.closing(open_coordinator(chosen, clock=clock)) as coordinator:
        yield Liveness(
            coordinator,
            JobKeys(chosen.job),
            clock,
            lambda record: is_master_answering(record, chosen.job, connector),
            say,
            is_unwanted,
        )


def claim(
    stack: contextlib.ExitStack,
    chosen: MasterSettings,
    storage: Storage | None,
    clock: Clock,
    say: Say,
    is_unwanted: Callable[[], bool],
) -> bool:
    """Hold the job's name until ``stack`` is closed. False if the start was cancelled.

    Raises:
        UsageError: the job is running, or the earlier job has to be resumed in another way.
    """
    liveness = stack.enter_context(liveness_of(chosen, clock, say, is_unwanted))
    held = liveness.claim_name(chosen.lease_ttl_s)
    if held is None:
        return False
    stack.callback(held.release)
    former = former_job(liveness.coordinator, liveness.keys)
    require_startable(former, chosen.etcd, storage, resume=chosen.resume is not Resume.NEVER)
    if former is not None and former.is_over and not former.can_retry:
        # Its last checkpoint contains everything.
        liveness.require_ended(held)
        if is_unwanted():
            return False
        forget(liveness.coordinator, liveness.keys)
    elif former is not None and chosen.resume is not Resume.NEVER:
        mark_resumed(liveness.coordinator, liveness.keys)
    return True
