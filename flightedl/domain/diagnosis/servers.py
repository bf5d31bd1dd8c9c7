"""Rules about etcd, the master, pservers, and the machines that all are on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from flightedl.domain.diagnosis.findings import Cause, Finding, Severity
from flightedl.domain.diagnosis.observations import Asked, Observations
from flightedl.messages.hosts import HostFacts

BROKEN, HARMFUL, NOTE = Severity

#: An answer that takes longer is slow.
_SLOW_ETCD_S = 0.5
#: Clocks that are further apart are told of. Nothing of flightedl decides by them; certificates and logs do.
_CLOCKS_S = 30.0
_RESTARTS = 3
_MEMORY_PART = 0.9


def etcd(seen: Observations) -> Iterator[Finding]:
    """Whether the store that all find each other by answers."""
    if not seen.etcd:
        return
    answering = [each for each in seen.etcd if each.seconds is not None]
    where = ", ".join(each.address for each in seen.etcd)
    refused = [each for each in seen.etcd if each.code == "authentication"]
    if not answering and refused:
        yield Finding(
            Cause.ACCESS_REFUSED,
            BROKEN,
            "etcd",
            f"etcd refuses access: {refused[0].error}",
            "Set etcd_tls_dir, etcd_user and etcd_password_file as the job's processes have them.",
        )
    elif not answering and any(each.is_connected for each in seen.etcd):
        yield Finding(
            Cause.ETCD_WITHOUT_QUORUM,
            BROKEN,
            "etcd",
            f"etcd at {where} takes connections and does not answer: it has lost its quorum, or its disk stands still",
            "See with `etcdctl endpoint status` which members are down, and start them; a cluster of n members needs "
            "n // 2 + 1. Pushes go on until leases end, and nothing of the job is lost.",
        )
    elif not answering:
        yield Finding(
            Cause.ETCD_UNREACHABLE,
            BROKEN,
            "etcd",
            f"nothing listens at {where}",
            "Start etcd, or say where it runs: --etcd HOST:PORT or FLIGHTEDL_ETCD.",
        )
    elif len(answering) < len(seen.etcd):
        missing = ", ".join(each.address for each in seen.etcd if each.seconds is None)
        yield Finding(
            Cause.ETCD_UNREACHABLE,
            NOTE,
            "etcd",
            f"the members of etcd at {missing} do not answer; the others do",
            "Start them again: one more that fails may cost the quorum.",
        )
    if answering and (slowest := max(each.seconds or 0.0 for each in answering)) > _SLOW_ETCD_S:
        yield Finding(
            Cause.ETCD_SLOW,
            HARMFUL,
            "etcd",
            f"etcd took {slowest:.1f} s to answer one read; every task that is handed out waits for a write",
            "Give it a disk of its own (it syncs each write), and look at etcd_disk_wal_fsync_duration_seconds.",
        )


def master(seen: Observations) -> Iterator[Finding]:
    """Whether there is a master, and the right one."""
    if seen.etcd and not any(each.seconds is not None for each in seen.etcd):
        return
    if not seen.lock_generation and not seen.address_generation and seen.job not in seen.jobs:
        others = [name for name in seen.jobs if name != seen.job]
        known = f"; there are {', '.join(others[:10])}" if others else ", and no other job either"
        yield Finding(
            Cause.UNKNOWN_JOB,
            BROKEN,
            "job",
            f"etcd has no job named {seen.job}{known}",
            "Say which job is meant: --job NAME or FLIGHTEDL_JOB. Or start it: a master comes first.",
        )
    elif not seen.lock_generation:
        yield Finding(
            Cause.NO_MASTER,
            BROKEN,
            "master",
            "no master holds the job's lock: no tasks are handed out, and nobody may join",
            "Start one with `flightedl master`; it goes on from what is in etcd. A second one may stand by.",
        )
    elif seen.master is not None and _is_deposed(seen):
        yield Finding(
            Cause.MASTER_DEPOSED,
            BROKEN,
            "master",
            f"the published address is of a master of generation {seen.address_generation}, which has been deposed: "
            f"generation {seen.lock_generation} holds the lock and has not published where it is",
            "Wait a few seconds: the new one indexes the data again first. If it stays so, look into its log.",
        )
    elif seen.master is None:
        yield Finding(
            Cause.NO_MASTER,
            BROKEN,
            "master",
            "a master holds the lock and has not published its address: it is recovering, or indexes the data",
            "Wait; its log says how far it is.",
        )
    elif seen.status is None:
        yield _unreachable("master", seen.master, Cause.MASTER_UNREACHABLE, "Tasks cannot be had, joins wait.")


def _is_deposed(seen: Observations) -> bool:
    is_other = 0 < seen.address_generation != seen.lock_generation
    return is_other or (seen.master is not None and seen.master.code in {"replaced", "fenced"})


def _unreachable(who: str, asked: Asked, cause: Cause, so: str) -> Finding:
    if asked.code == "authentication":
        advice = "Give --tls-dir a certificate of this job that may ask: an admin's or a reader's."
        return Finding(Cause.ACCESS_REFUSED, BROKEN, who, f"{who} refuses to answer: {asked.error}", advice)
    if asked.is_connected:
        text = f"{who} at {asked.address} takes connections and does not answer: it stands still, or is overloaded"
        advice = "See that its machine is not frozen or out of CPU; it is replaced when its lease ends."
    else:
        text = f"{who} at {asked.address} has a lease in etcd and cannot be reached from here"
        advice = "See that a firewall lets its port through, and that its --advertise address is right from here."
    return Finding(cause, BROKEN, who, f"{text}. {so}", advice)


def pservers(seen: Observations) -> Iterator[Finding]:
    """Whether all pservers are there, answer, and have what they should."""
    status = seen.status
    desired = len(seen.pservers) if status is None else status.pservers_desired
    missing = [index for index in range(desired) if index not in seen.pservers]
    if missing:
        names = ", ".join(f"pserver-{index}" for index in missing)
        yield Finding(
            Cause.PSERVER_MISSING,
            BROKEN,
            f"pserver-{missing[0]}",
            f"{len(missing)} of {desired} pservers are missing ({names}): their blocks cannot be pushed to or pulled",
            "Start as many with `flightedl pserver`; each takes a free index and loads the newest checkpoint.",
        )
    for index, asked in sorted(seen.pservers.items()):
        if index not in seen.replies:
            yield from _silent_pserver(seen, index, asked)
    yield from _restarts(seen)
    yield from _memory(seen)
    yield from _state(seen)


def _silent_pserver(seen: Observations, index: int, asked: Asked) -> Iterator[Finding]:
    who = f"pserver-{index}"
    known = [] if seen.status is None else [each for each in seen.status.pservers if each.index == index]
    if known and known[0].state != "not reached" and not asked.is_connected:
        advice = "Nothing is wrong if only your machine is cut off; trainers need a way to every pserver."
        text = f"{who} at {asked.address} answers the master and cannot be reached from here: something is between"
        yield Finding(Cause.PSERVER_CUT_OFF, NOTE, who, text, advice)
    else:
        yield _unreachable(who, asked, Cause.PSERVER_UNREACHABLE, "Steps that need its blocks wait.")


def _restarts(seen: Observations) -> Iterator[Finding]:
    gone = Counter(event.who for event in seen.events if event.kind == "pserver_gone")
    for who, count in gone.items():
        if count >= _RESTARTS:
            yield Finding(
                Cause.PSERVER_RESTARTS,
                HARMFUL,
                who,
                f"{who} has ended {count} times since this master leads",
                "Look at the end of its log, and whether the kernel kills it for memory (`dmesg`, or `kubectl describe "
                "pod`: OOMKilled). Each time it loads a checkpoint, and what was done since is done again.",
            )


def _memory(seen: Observations) -> Iterator[Finding]:
    for index, reply in sorted(seen.replies.items()):
        facts, who = reply.facts, f"pserver-{index}"
        limit = 0 if facts is None else facts.memory_limit_bytes
        is_near = facts is not None and limit and facts.memory_bytes > _MEMORY_PART * limit
        busy = reply.refused_calls.get("busy", 0)
        if is_near and facts is not None:
            part, text = (
                facts.memory_bytes / limit,
                "it refuses gradients as busy" if busy else "the kernel may kill it",
            )
            yield Finding(
                Cause.PSERVER_OUT_OF_MEMORY,
                HARMFUL,
                who,
                f"{who} has {facts.memory_bytes / 2**30:.1f} GiB of at most {limit / 2**30:.1f} GiB ({part:.0%}): "
                f"{text}",
                "Give it more memory, or begin the job again with more pservers (a checkpoint fits any number). With "
                "checkpoints a pserver takes twice the memory of its blocks.",
            )


def _state(seen: Observations) -> Iterator[Finding]:
    status = seen.status
    for index, reply in sorted(seen.replies.items()):
        who = f"pserver-{index}"
        if status is not None and status.plan_hash and reply.plan_hash and reply.plan_hash != status.plan_hash:
            yield Finding(
                Cause.OTHER_PLAN,
                BROKEN,
                who,
                f"{who} has cut the model by another plan ({reply.plan_hash[:8]}) than the job "
                f"({status.plan_hash[:8]})",
                "It runs another version of flightedl, or belongs to another declaration: restart it with the job's.",
            )
        elif reply.state != "serving" and reply.waiting_for and status is not None and status.trainers:
            yield Finding(
                Cause.PSERVER_WAITS,
                HARMFUL,
                who,
                f"{who} does not serve yet: it waits for {reply.waiting_for}",
                "First values come from one of the trainers; a checkpoint that is loaded takes as long as its storage; "
                "kernels are compiled once on a machine, by `python -m flightedl.kernels` ahead of all jobs.",
            )


def refusals(seen: Observations) -> Iterator[Finding]:
    """Whether somebody asks for what cannot be."""
    status = seen.status
    declared = 0 if status is None or status.master is None else status.master.refused_calls.get("declaration", 0)
    if declared:
        yield Finding(
            Cause.OTHER_JOB,
            HARMFUL,
            "master",
            f"{declared} times somebody declared another model or dataset under the name {seen.job}, and was refused",
            "Two jobs, or two versions of a script, use one name: give one of them another --job, or stop it. The "
            "error of the refused script says what differs.",
        )
    refused = [event for event in seen.events if event.kind == "job_refused"]
    if refused:
        yield Finding(
            Cause.JOB_REFUSED, BROKEN, refused[-1].who or "job", refused[-1].text, "Begin it again with --resume."
        )
    bad = {i: r.refused_calls["gradient"] for i, r in seen.replies.items() if r.refused_calls.get("gradient")}
    if bad:
        index = max(bad, key=lambda each: bad[each])
        yield Finding(
            Cause.GRADIENTS_REFUSED,
            HARMFUL,
            f"pserver-{index}",
            f"pserver-{index} refused {bad[index]} gradients: they were not finite, or of a wrong shape",
            "Lower the learning rate, or clip gradients (clip_norm=); the trainer's error names parameter and batch.",
        )


def machines(seen: Observations) -> Iterator[Finding]:
    """Versions, clocks and threads."""
    known = {who: facts for who, facts, _ in _facts(seen)}
    versions: defaultdict[str, list[str]] = defaultdict(list)
    for who, facts in {"this command": seen.asker, **known}.items():
        if facts.version:
            versions[facts.version].append(who)
    if len(versions) > 1:
        told = "; ".join(f"{version}: {', '.join(sorted(who)[:5])}" for version, who in sorted(versions.items()))
        yield Finding(
            Cause.VERSIONS_DIFFER,
            HARMFUL,
            "job",
            f"processes run different versions of flightedl ({told})",
            "Install one version everywhere: messages that one does not know are refused by the other.",
        )
    for who, facts, heard_s in _facts(seen):
        apart_s = facts.wall_s - heard_s
        if facts.wall_s and heard_s and abs(apart_s) > _CLOCKS_S:
            way = "ahead of" if apart_s > 0 else "behind"
            yield Finding(
                Cause.CLOCKS_DIFFER,
                NOTE,
                who,
                f"the clock of {who} is {abs(apart_s):,.0f} s {way} the one here",
                "Leases and rounds do not mind. Certificates, logs and checkpoint times do: let NTP set the clocks.",
            )
    yield from _threads(seen)


def _facts(seen: Observations) -> Iterator[tuple[str, HostFacts, float]]:
    """(who, facts, when that was heard by the clock here)."""
    status = seen.status
    if status is not None and status.master is not None and status.master.facts is not None and seen.master is not None:
        yield "master", status.master.facts, seen.master.heard_s
    for index, reply in sorted(seen.replies.items()):
        if reply.facts is not None and index in seen.pservers:
            yield f"pserver-{index}", reply.facts, seen.pservers[index].heard_s
    for trainer in () if status is None else status.trainers:
        if trainer.facts is not None and seen.master is not None:
            yield trainer.trainer, trainer.facts, seen.master.heard_s - trainer.silent_s


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
                f"{len(facts)} trainers on {host} begin {threads} threads for linear algebra on {cores} cores",
                f"Set OMP_NUM_THREADS={max(1, cores // len(facts))} for each of them; `flightedl run` does so by "
                "itself.",
            )
