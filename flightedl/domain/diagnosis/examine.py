"""Applies all rules, and sorts the resulting findings."""

from __future__ import annotations

from flightedl.domain.diagnosis import probes, servers, trainers, work
from flightedl.domain.diagnosis.findings import Cause, Finding, Severity
from flightedl.domain.diagnosis.observations import Observations

_RULES = (
    servers.etcd,
    servers.master,
    servers.pservers,
    servers.refusals,
    servers.machines,
    servers.load,
    trainers.trainers,
    work.work,
    work.checkpoints,
    probes.store,
    probes.disks,
    probes.certificates,
)
#: Cause -> its consequences, which are omitted if the cause itself is found.
_HIDES = {
    Cause.ETCD_UNREACHABLE: {Cause.NO_MASTER, Cause.UNKNOWN_JOB, Cause.PSERVER_MISSING},
    Cause.ETCD_WITHOUT_QUORUM: {Cause.NO_MASTER, Cause.UNKNOWN_JOB, Cause.PSERVER_MISSING, Cause.ETCD_SLOW},
    Cause.ETCD_FULL: {Cause.NO_MASTER, Cause.UNKNOWN_JOB, Cause.PSERVER_MISSING, Cause.NO_TRAINERS},
    Cause.UNKNOWN_JOB: {Cause.PSERVER_MISSING, Cause.NO_TRAINERS},
    Cause.TRAINER_STANDS_STILL: {Cause.SLOW_FILE},
    Cause.TRAINER_IS_SLOW: {Cause.SLOW_FILE},
    Cause.OTHER_PLAN: {Cause.PSERVER_WAITS},
}


def examine(seen: Observations) -> list[Finding]:
    """Return the findings, worst first; empty if there is no problem."""
    found = [finding for rule in _RULES for finding in rule(seen)]
    hidden = {
        cause for finding in found if finding.severity is not Severity.NOTE for cause in _HIDES.get(finding.cause, ())
    }
    return sorted((each for each in found if each.cause not in hidden), key=lambda each: each.severity)
