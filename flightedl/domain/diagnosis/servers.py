"""Rules about etcd, the master, pservers and their hosts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from flightedl.domain.diagnosis.findings import Cause, Finding, Severity
from flightedl.domain.diagnosis.observations import Asked, Observations
from flightedl.domain.diagnosis.profile import shares
from flightedl.domain.etcd_versions import warning_about
from flightedl.domain.scaling.pservers import PserverLoad
from flightedl.messages.hosts import HostFacts
from flightedl.messages.status import StatusReply

BROKEN, HARMFUL, NOTE = Severity

#: Etcd counts as slow if a reply takes longer than this many seconds.
_SLOW_ETCD_S = 0.5
#: Report clocks that differ by more than this many seconds. Only certificates, logs and checkpoint times are affected.
_CLOCKS_S = 30.0
_RESTARTS = 3
_MEMORY_PART = 0.9


def etcd(seen: Observations) -> Iterator[Finding]:
    """Check that etcd answers, and that it is fast enough."""
    if not seen.etcd:
        return
    answering = [each for each in seen.etcd if each.seconds is not None]
    where = ", ".join(each.address for each in seen.etcd)
    refused = [each for each in seen.etcd if each.code == "authentication"]
    if full := [each.address for each in answering if each.is_full]:
        yield Finding(
            Cause.ETCD_FULL,
            BROKEN,
            "etcd",
            f"etcd at {', '.join(full)} is full: it rejects all writes, so no task is assigned and no process can join",
            "Compact and defragment it with `etcdctl compact` and `etcdctl defrag`, or raise --quota-backend-bytes. "
            "Then run `etcdctl alarm disarm`.",
        )
    if not answering and refused:
        yield Finding(
            Cause.ACCESS_REFUSED,
            BROKEN,
            "etcd",
            f"etcd denies access: {refused[0].error}",
            "Set etcd_tls_dir, etcd_user and etcd_password_file to the same values as in the job's processes.",
        )
    elif not answering and any(each.is_connected for each in seen.etcd):
        yield Finding(
            Cause.ETCD_WITHOUT_QUORUM,
            BROKEN,
            "etcd",
            f"etcd at {where} accepts connections but does not answer: it has lost its quorum, or its disk is stuck",
            "Find the members that are down with `etcdctl endpoint status`, and start them. A cluster of n members "
            "needs n // 2 + 1. Pushes continue until leases expire, and the job loses nothing.",
        )
    elif not answering:
        yield Finding(
            Cause.ETCD_UNREACHABLE,
            BROKEN,
            "etcd",
            f"nothing listens at {where}",
            "Start etcd, or set its address with --etcd HOST:PORT or FLIGHTEDL_ETCD.",
        )
    elif len(answering) < len(seen.etcd):
        missing = ", ".join(each.address for each in seen.etcd if each.seconds is None)
        yield Finding(
            Cause.ETCD_UNREACHABLE,
            NOTE,
            "etcd",
            f"the etcd members at {missing} do not answer; the others do",
            "Restart them: etcd may lose its quorum if another member fails.",
        )
    if answering and (slowest := max(each.seconds or 0.0 for each in answering)) > _SLOW_ETCD_S:
        yield Finding(
            Cause.ETCD_SLOW,
            HARMFUL,
            "etcd",
            f"etcd took {slowest:.1f} s to answer a read; each assignment of a task waits for a write",
            "Give etcd a disk of its own, because it syncs each write; see etcd_disk_wal_fsync_duration_seconds.",
        )
    warnings = (warning_about(each.version, each.member_count, each.address) for each in answering)
    if text := next(filter(None, warnings), ""):
        problem, advice = text.rsplit(". ", 1)
        yield Finding(Cause.ETCD_UNSOUND, HARMFUL, "etcd", problem, f"{advice}.")


def master(seen: Observations) -> Iterator[Finding]:
    """Check that the job has a master, and that this master is the elected leader."""
    if seen.etcd and not any(each.seconds is not None for each in seen.etcd):
        return
    if not seen.lock_generation and not seen.address_generation and seen.job not in seen.jobs:
        others = [name for name in seen.jobs if name != seen.job]
        known = f"; it has {', '.join(others[:10])}" if others else ", nor any other job"
        yield Finding(
            Cause.UNKNOWN_JOB,
            BROKEN,
            "job",
            f"etcd has no job named {seen.job}{known}",
            "Choose a job with --job NAME or FLIGHTEDL_JOB, or start this one, beginning with a master.",
        )
    elif not seen.lock_generation:
        yield Finding(
            Cause.NO_MASTER,
            BROKEN,
            "master",
            "no master holds the job's lock: no tasks are assigned, and no process can join",
            "Start a master with `flightedl master`. It continues from the state in etcd. A second one may stand by.",
        )
    elif seen.master is not None and _is_deposed(seen):
        yield Finding(
            Cause.MASTER_DEPOSED,
            BROKEN,
            "master",
            f"the published address belongs to the deposed master of generation {seen.address_generation}; generation "
            f"{seen.lock_generation} holds the lock but has not published its address",
            "Wait a few seconds while the new master indexes the data. If this persists, see its log.",
        )
    elif seen.master is None:
        yield Finding(
            Cause.NO_MASTER,
            BROKEN,
            "master",
            "a master holds the lock but has not published its address: it is recovering or indexing the data",
            "Wait; its log shows its progress.",
        )
    elif seen.status is None:
        yield _unreachable(
            "master", seen.master, Cause.MASTER_UNREACHABLE, "No tasks are assigned, and no process can join."
        )


def _is_deposed(seen: Observations) -> bool:
    is_other = 0 < seen.address_generation != seen.lock_generation
    return is_other or (seen.master is not None and seen.master.code in {"replaced", "fenced"})


def _unreachable(who: str, asked: Asked, cause: Cause, so: str) -> Finding:
    if asked.code == "authentication":
        advice = "Set --tls-dir to certificates of this job's admin or reader."
        return Finding(Cause.ACCESS_REFUSED, BROKEN, who, f"{who} denies access: {asked.error}", advice)
    if asked.is_connected:
        text = f"{who} at {asked.address} accepts connections but does not answer: it is frozen or overloaded"
        advice = "Check its machine for a freeze or a lack of CPU. The process is replaced when its lease expires."
    else:
        text = f"{who} at {asked.address} has a lease in etcd, but this machine cannot reach it"
        advice = "Check that firewalls allow its port, and that its --advertise address is valid on this machine."
    return Finding(cause, BROKEN, who, f"{text}. {so}", advice)


def pservers(seen: Observations) -> Iterator[Finding]:
    """Check that all pservers are running, answer, and hold the right blocks and tables."""
    status = seen.status
    desired = len(seen.pservers) if status is None else status.pservers_desired
    missing = [index for index in range(desired) if index not in seen.pservers]
    if missing:
        names = ", ".join(f"pserver-{index}" for index in missing)
        yield Finding(
            Cause.PSERVER_MISSING,
            BROKEN,
            f"pserver-{missing[0]}",
            f"{len(missing)} of {desired} pservers are missing ({names}): trainers cannot push or pull their blocks",
            f"Start {len(missing)} with `flightedl pserver`. Each takes a free index and loads the newest checkpoint.",
        )
    for index, asked in sorted(seen.pservers.items()):
        if index not in seen.replies:
            yield from _silent_pserver(seen, index, asked)
    yield from _restarts(seen)
    yield from _memory(seen)
    yield from _state(seen)


def _silent_pserver(seen: Observations, index: int, asked: Asked) -> Iterator[Finding]:
    who = seen.pserver(index)
    known = [] if seen.status is None else [each for each in seen.status.pservers if each.index == index]
    if known and known[0].state != "not reached" and not asked.is_connected:
        advice = "This is harmless if it affects only your machine, but trainers must reach every pserver."
        text = f"{who} at {asked.address} answers the master, but this machine cannot reach it"
        yield Finding(Cause.PSERVER_CUT_OFF, NOTE, who, text, advice)
    else:
        yield _unreachable(who, asked, Cause.PSERVER_UNREACHABLE, "Steps that need its blocks are waiting.")


def _restarts(seen: Observations) -> Iterator[Finding]:
    deaths = Counter(event.who for event in seen.events if event.kind == "pserver_gone")
    for who, count in deaths.items():
        if count >= _RESTARTS:
            yield Finding(
                Cause.PSERVER_RESTARTS,
                HARMFUL,
                who,
                f"{who} has died {count} times since the master took over",
                "See the end of its log, and check if the kernel kills it for lack of memory (`dmesg`, or OOMKilled in "
                "`kubectl describe pod`). Each time, it loads a checkpoint, and later batches are repeated.",
            )


def _memory(seen: Observations) -> Iterator[Finding]:
    for index, reply in sorted(seen.replies.items()):
        facts, who = reply.facts, seen.pserver(index)
        limit = 0 if facts is None else facts.memory_limit_bytes
        is_near = facts is not None and limit and facts.memory_bytes > _MEMORY_PART * limit
        busy = reply.refused_calls.get("busy", 0)
        if is_near and facts is not None:
            part, text = (
                facts.memory_bytes / limit,
                "it rejects gradients as busy" if busy else "the kernel may kill it",
            )
            yield Finding(
                Cause.PSERVER_OUT_OF_MEMORY,
                HARMFUL,
                who,
                f"{who} uses {facts.memory_bytes / 2**30:.1f} of at most {limit / 2**30:.1f} GiB of memory "
                f"({part:.0%}): {text}",
                "Give it more memory, or move some of its blocks to additional pservers: `flightedl scale pservers N`. "
                "With checkpoints, a pserver needs twice the memory of its blocks.",
            )


def _state(seen: Observations) -> Iterator[Finding]:
    status = seen.status
    for index, reply in sorted(seen.replies.items()):
        who = seen.pserver(index)
        if status is not None and status.plan_hash and reply.plan_hash and reply.plan_hash != status.plan_hash:
            yield Finding(
                Cause.OTHER_PLAN,
                BROKEN,
                who,
                f"{who} uses another shard plan ({reply.plan_hash[:8]}) than the job ({status.plan_hash[:8]})",
                "It runs another version of flightedl, or has another declaration. Restart it with the job's version.",
            )
        elif reply.state != "serving" and reply.waiting_for and status is not None and status.trainers:
            yield Finding(
                Cause.PSERVER_WAITS,
                HARMFUL,
                who,
                f"{who} does not serve yet: it is waiting for {reply.waiting_for}",
                "One of the trainers sends the first values. Loading a checkpoint takes as long as its storage needs. "
                "Kernels are compiled once per machine; `python -m flightedl.kernels` compiles them in advance.",
            )


def load(seen: Observations) -> Iterator[Finding]:
    """Report pservers that limit the job's throughput."""
    found = None if seen.status is None else load_of(seen.status)
    if found is None or not found.is_limiting:
        return
    text = (
        f"trainers spend {found.time:.0%} of their time sending gradients and receiving values, and each pserver uses "
        f"{found.busy_cores:.1f} cores: pservers limit the throughput"
    )
    more = (
        f"Run `flightedl scale pservers {found.wanted}` if there are machines with free cores for them. "
        if found.wanted > found.pservers
        else "Their messages are small, so more pservers would not help. "
    )
    advice = "Larger batches, wire='bfloat16' and Async(push_every=) reduce the load."
    yield Finding(Cause.PSERVERS_LIMIT, HARMFUL, "job", text, more + advice)


def load_of(status: StatusReply, profile: Mapping[str, float] | None = None) -> PserverLoad | None:
    """Return the load of a job's pservers; None if it is unknown.

    Args:
        status: Status of the job.
        profile: Profile of the trainers' loops; None for the whole time of the master.
    """
    parts = shares(status.profile if profile is None else profile)
    facts = [each.facts for each in status.pservers if each.facts is not None]
    if not parts or not facts:
        return None
    messages = sum(each.pushes for each in status.pservers)
    return PserverLoad(
        pservers=status.pservers_desired,
        busy_cores=sum(each.busy_cores for each in facts) / len(facts),
        message_bytes=sum(each.received_bytes for each in status.pservers) / max(messages, 1),
        time=parts["push"] + parts["pull"],
    )


def refusals(seen: Observations) -> Iterator[Finding]:
    """Report requests that servers have rejected."""
    status = seen.status
    declared = 0 if status is None or status.master is None else status.master.refused_calls.get("declaration", 0)
    if declared:
        yield Finding(
            Cause.OTHER_JOB,
            HARMFUL,
            "master",
            f"the master rejected {declared} declarations of another model or dataset under the name {seen.job}",
            "Two jobs, or two versions of a script, use the same name. Give one of them another --job, or stop it. The "
            "error of the rejected script shows the difference.",
        )
    refused = [event for event in seen.events if event.kind == "job_refused"]
    if refused:
        yield Finding(
            Cause.JOB_REFUSED, BROKEN, refused[-1].who or "job", refused[-1].text, "Restart the job with --resume."
        )
    bad = {i: r.refused_calls["gradient"] for i, r in seen.replies.items() if r.refused_calls.get("gradient")}
    if bad:
        index = max(bad, key=lambda each: bad[each])
        yield Finding(
            Cause.GRADIENTS_REFUSED,
            HARMFUL,
            seen.pserver(index),
            f"{seen.pserver(index)} rejected {bad[index]} gradients that were not finite or had a wrong shape",
            "Lower the learning rate, or clip gradients (clip_norm=). The trainer's error names parameter and batch.",
        )


def machines(seen: Observations) -> Iterator[Finding]:
    """Compare versions and clocks of the processes, and check the number of threads."""
    known = {who: facts for who, facts, _ in _facts(seen)}
    versions: defaultdict[str, list[str]] = defaultdict(list)
    for who, facts in {"this command": seen.asker, **known}.items():
        if facts.version:
            versions[facts.version].append(who)
    if len(versions) > 1:
        listing = "; ".join(f"{version}: {', '.join(sorted(who)[:5])}" for version, who in sorted(versions.items()))
        yield Finding(
            Cause.VERSIONS_DIFFER,
            HARMFUL,
            "job",
            f"processes run different versions of flightedl ({listing})",
            "Install the same version everywhere: processes reject messages that they do not know.",
        )
    for who, facts, received_s in _facts(seen):
        apart_s = facts.wall_s - received_s
        if facts.wall_s and received_s and abs(apart_s) > _CLOCKS_S:
            way = "ahead of" if apart_s > 0 else "behind"
            yield Finding(
                Cause.CLOCKS_DIFFER,
                NOTE,
                who,
                f"the clock of {who} is {abs(apart_s):,.0f} s {way} this machine's",
                "Synchronize the clocks with NTP. They affect certificates, logs and times of checkpoints only.",
            )
    yield from _threads(seen)


def _facts(seen: Observations) -> Iterator[tuple[str, HostFacts, float]]:
    status = seen.status
    if status is not None and status.master is not None and status.master.facts is not None and seen.master is not None:
        yield "master", status.master.facts, seen.master.received_s
    for index, reply in sorted(seen.replies.items()):
        if reply.facts is not None and index in seen.pservers:
            yield seen.pserver(index), reply.facts, seen.pservers[index].received_s
    for trainer in () if status is None else status.trainers:
        if trainer.facts is not None and seen.master is not None:
            yield trainer.trainer, trainer.facts, seen.master.received_s - trainer.silent_s


def _threads(seen: Observations) -> Iterator[Finding]:
    hosts: defaultdict[str, list[HostFacts]] = defaultdict(list)
    for trainer in () if seen.status is None else seen.status.trainers:
        if trainer.facts is not None and trainer.facts.cores and trainer.host:
            hosts[trainer.host].append(trainer.facts)
    for host, facts in sorted(hosts.items()):
        cores = max(each.cores for each in facts)
        threads = sum(each.threads or each.cores for each in facts)
        if len(facts) > 1 and threads > 2 * cores:
            yield Finding(
                Cause.TOO_MANY_THREADS,
                HARMFUL,
                host,
                f"{len(facts)} trainers on {host} start {threads} threads for linear algebra on {cores} cores",
                f"Set OMP_NUM_THREADS={max(1, cores // len(facts))} for each trainer, as `flightedl run` does.",
            )
