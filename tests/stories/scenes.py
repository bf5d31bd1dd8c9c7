"""Simulated jobs in which one thing fails, and what their recordings tell about it.

A scene is one row of the README's table "What happens when something dies". Its job is small and has no other fault, so
its story is short. A seed determines the messages' latencies, and therefore the whole story.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.domain.consistency.modes import Async
from flightedl.recording.reader import recordings_in
from flightedl.recording.story import story, subject_of, text_of
from tests.simulation.cores.cluster import Cluster
from tests.simulation.cores.job import JobShape
from tests.simulation.cores.scenario import Scenario
from tests.simulation.cores.trainer import Trainer
from tests.simulation.cores.world import NetworkFaults, Process

#: Seconds without a moment after which a story mentions the pause.
_PAUSE_S = 1.0
_SEED = 1
_FROZEN_S = 8.0
_DOWN_S = 1.0
#: Numbers of batches of the tasks.
_BATCHES = (2, 2, 2)
_NO_FAULTS = NetworkFaults(0.0, 0.0, 0.0, 0.0)

#: A condition for the fault, and the fault.
When = Callable[[Cluster], bool]
Strike = Callable[[Cluster], None]
#: Seconds between two looks at the condition.
_LOOK_S = 0.01
#: Moments that would only make the stories longer.
_OMITTED = re.compile(r"receives (blocks? .* at version|a view)|trainer joined the rounds|.*index=\d")


@dataclass(frozen=True, slots=True)
class Scene:
    """A job with a fault.

    Args:
        when: The fault happens as soon as this is true.
        strike: Causes the fault.
        text: The fault, as a line of the story.
        subject: Kind and identity of the subject of the story.
    """

    when: When
    strike: Strike
    text: str
    subject: tuple[str, str] = ("task", "1/0")
    pservers: int = 1
    trainers: int = 2
    checkpoint_every_s: float = 100.0
    keeps_checkpoints: bool = True
    faulty: bool = False

    def told(self, directory: Path) -> str:
        """Run the job, record it in the directory, and return its story."""
        cluster = Cluster(_SEED, record=directory, scenario=self._scenario())
        happened: list[float] = []

        def look() -> None:
            if self.when(cluster):
                happened.append(cluster.world.now)
                self.strike(cluster)
            else:
                cluster.world.after(_LOOK_S, look)

        look()
        try:
            cluster.run()
        finally:
            cluster.close()
        lines = [(at, "*", self.text) for at in happened]
        moments = story(recordings_in(directory), subject_of(*self.subject))
        lines += [(each.at, each.process, text) for each in moments if not _OMITTED.match(text := text_of(each))]
        return "\n".join(_printed(sorted(lines, key=lambda line: line[0])))

    def _scenario(self) -> Scenario:
        shape = JobShape(
            mode=Async(),
            batch_counts=_BATCHES,
            epochs=1,
            seed=_SEED,
            shuffle=False,
            cut_for=self.pservers,
            recovery="replay",
            first_count=len(_BATCHES),
            faulty={(1, 1): False} if self.faulty else {},
            attempts_limit=2 if self.faulty else 100_000,
        )
        return Scenario(
            shape=shape,
            mode_name="async",
            changes_modes=False,
            may_be_stopped=False,
            has_many_tasks=False,
            pserver_count=self.pservers,
            trainer_count=self.trainers,
            batch_s=2.0,
            standby_masters=1,
            spare_pservers=0,
            checkpoints=CheckpointSettings(interval_s=self.checkpoint_every_s),
            keeps_checkpoints=self.keeps_checkpoints,
            network=_NO_FAULTS,
            fault_scale=0.0,
            store_error_rate=0.0,
            break_rate=0.0,
        )


def _printed(lines: Sequence[tuple[float, str, str]]) -> Iterator[str]:
    """Yield lines without what differs between equal stories: times, and the values of numbers that only identify."""
    names = _Names()
    texts = [(at, names.replaced(process), names.replaced(text)) for at, process, text in lines]
    width = max(len(process) for _, process, _ in texts)
    before = texts[0][0]
    for at, process, text in texts:
        if at - before >= _PAUSE_S:
            yield f"{'':{width}}  ... {at - before:.0f} s later"
        before = at
        yield f"*** {text} ***" if process == "*" else f"{process:{width}}  {text}"


class _Names:
    """Replaces generations, members and elections by small numbers, in the order of their appearance."""

    _PATTERNS = (
        ("generation", re.compile(r"(?<=master )\d+|(?<=pserver \d \()\d+|(?<=generation[ =])\d+")),
        ("generation", re.compile(r"(?<=generations \[)[\d, ]+")),
        ("member", re.compile(r"(?<=member[ =])\d+")),
        ("election", re.compile(r"(?<=election )\d+")),
    )

    def __init__(self) -> None:
        self._known: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def replaced(self, text: str) -> str:
        for kind, pattern in self._PATTERNS:
            text = pattern.sub(partial(self._small, self._known[kind]), text)
        return text

    @staticmethod
    def _small(known: dict[str, str], found: re.Match[str]) -> str:
        return ", ".join(known.setdefault(each, str(len(known) + 1)) for each in found[0].split(", "))


def _holders(cluster: Cluster) -> list[Trainer]:
    """Return the trainers that work on the last batch of the first task."""
    trainers = (each for each in cluster.processes if isinstance(each, Trainer) and each.body is not None)
    return [each for each in trainers if (each.body.batch.task, each.body.batch.number) == (0, 1)]


def _is_half_done(cluster: Cluster) -> bool:
    return bool(_holders(cluster))


def _is_done(cluster: Cluster) -> bool:
    """True if the first task is done. No checkpoint has it yet, unless checkpoints are frequent."""
    leader = cluster.leader()
    queue = None if leader is None or leader.core.work is None else leader.core.work.queue
    return queue is not None and queue.counts().done > 0 and (cluster.pointer() is not None or not _has_store(cluster))


def _has_store(cluster: Cluster) -> bool:
    return cluster.scenario.keeps_checkpoints


def _kill(chosen: Callable[[Cluster], Process]) -> Strike:
    def strike(cluster: Cluster) -> None:
        cluster.revoke_for(chosen(cluster))
        cluster.etcd.review()

    return strike


def _leader(cluster: Cluster) -> Process:
    leader = cluster.leader()
    assert leader is not None, "the job has a leader"
    return leader


def _freeze(cluster: Cluster) -> None:
    process = _holders(cluster)[0]
    process.freeze()
    cluster.etcd.review()

    def wake() -> None:
        process.is_frozen = False
        cluster.etcd.review()
        process.wake()

    cluster.world.after(_FROZEN_S, wake)


def _stop_etcd(cluster: Cluster) -> None:
    cluster.etcd.is_down = True
    cluster.etcd.review()

    def up() -> None:
        cluster.etcd.is_down = False
        cluster.etcd.review()

    cluster.world.after(_DOWN_S, up)


def _leave(cluster: Cluster) -> None:
    trainer = _holders(cluster)[0]
    cluster.account.out_of_step.add(trainer.membership.member)
    trainer.leave_loop(is_begun_again=False, raises=False)


_kill_trainer = _kill(lambda cluster: _holders(cluster)[0])
_kill_pserver = _kill(lambda cluster: cluster.serving()[0])
#: Row of the README's table -> its scene.
SCENES = {
    "a trainer dies": Scene(_is_half_done, _kill_trainer, "the trainer is killed"),
    "the master dies": Scene(_is_half_done, _kill(_leader), "the master is killed"),
    "a process freezes and later wakes up": Scene(_is_half_done, _freeze, f"the trainer freezes for {_FROZEN_S:g} s"),
    "etcd is down for a while": Scene(_is_half_done, _stop_etcd, f"etcd is down for {_DOWN_S:g} s"),
    "a pserver dies, with `--checkpoint`": Scene(
        _is_done, _kill_pserver, "pserver 0 is killed", pservers=2, checkpoint_every_s=1.0
    ),
    "a pserver dies before the first checkpoint, or without `--checkpoint`": Scene(
        _is_done, _kill_pserver, "pserver 0 is killed", ("batch", "1/0/0"), pservers=2, keeps_checkpoints=False
    ),
    "the whole job dies": Scene(
        _is_done, Cluster.restart_job, "all processes are killed, and etcd's data is lost", checkpoint_every_s=1.0
    ),
    "your script leaves its loop early": Scene(_is_half_done, _leave, "the script leaves its loop"),
    "your script raises an exception": Scene(
        lambda _: True, lambda _: None, "batch 1/1/1 raises in every attempt", ("task", "1/1"), trainers=1, faulty=True
    ),
}
