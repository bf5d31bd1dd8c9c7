"""Kills and freezes a running job's processes in a sequence determined by a seed.

Trainers, pservers, masters and etcd are struck at random intervals, sometimes two at the same moment, because a pair of
faults can reveal an error that a single fault cannot. The seed determines the sequence of strikes, but not what a
process is doing when it is struck.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flightedl.errors import UnavailableError
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.policy import Role

#: Probability that a second strike follows at the same moment.
_PAIRS = 0.25
_FREEZES = 0.35
#: Bounds on a freeze, in units of a lease's time to live: too short to lose the lease, or long enough to be replaced.
_FROZEN = (0.1, 2.0)


@dataclass(frozen=True, slots=True)
class Strike:
    """A kill, or a freeze if ``frozen_s`` is not 0."""

    #: Seconds since the strike before.
    after_s: float
    role: Role
    #: Number from 0 to 1 that selects one of the role's running processes.
    which: float
    frozen_s: float = 0.0


def strikes(seed: int, roles: Sequence[Role], *, every_s: float, lease_s: float) -> Iterator[Strike]:
    """Yield strikes without end.

    Args:
        seed: Seed of the sequence.
        roles: Roles of processes to strike.
        every_s: Mean seconds between strikes.
        lease_s: TTL of the processes' leases.
    """
    chance = random.Random(seed)  # noqa: S311 - no secrets
    while True:
        is_second = chance.random() < _PAIRS
        after_s = 0.0 if is_second else chance.expovariate(1 / every_s)
        frozen_s = chance.uniform(*_FROZEN) * lease_s if chance.random() < _FREEZES else 0.0
        yield Strike(after_s, chance.choice(roles), chance.random(), frozen_s)


class Striker:
    """Carries out strikes on a cluster's processes when they are due.

    Args:
        cluster: The running cluster.
        plan: The strikes.
    """

    def __init__(self, cluster: LocalCluster, plan: Iterator[Strike]) -> None:
        self._cluster = cluster
        self._plan = plan
        self._next = next(plan)
        #: Time of the next strike; None before the first call of ``strike``.
        self._due_at: float | None = None
        #: (role, index) of each frozen process -> time at which it continues.
        self._frozen: dict[tuple[Role, int], float] = {}
        #: Number of strikes of each kind, such as "kill trainer".
        self.done: Counter[str] = Counter()

    @property
    def is_started(self) -> bool:
        """True once ``strike`` was called."""
        return self._due_at is not None

    def strike(self, now: float) -> Iterator[str]:
        """Carry out all strikes that are due. Yield a message about each strike. The first call starts the plan."""
        if self._due_at is None:
            self._due_at = now + self._next.after_s
        yield from self._thaw(now)
        while self._due_at <= now:
            if sentence := self._carry_out(self._next, now):
                yield sentence
            self._next = next(self._plan)
            self._due_at += self._next.after_s

    def end(self) -> None:
        """Let all frozen processes continue."""
        for _ in self._thaw(float("inf")):
            pass

    def _thaw(self, now: float) -> Iterator[str]:
        for (role, index), until in list(self._frozen.items()):
            if until <= now:
                del self._frozen[role, index]
                # If the process has been replaced, its successor ignores the signal.
                if self._send(role, index, signal.SIGCONT):
                    yield f"let {role} {index} continue"

    def _carry_out(self, strike: Strike, now: float) -> str:
        running = [
            view.slot
            for view in self._cluster.processes
            if view.slot.role is strike.role and view.pid is not None
            if (strike.role, view.slot.index) not in self._frozen
        ]
        if not running:
            return ""
        slot = running[int(strike.which * len(running))]
        kind, number = ("freeze", signal.SIGSTOP) if strike.frozen_s else ("kill", signal.SIGKILL)
        pid = self._send(slot.role, slot.index, number)
        if not pid:
            return ""
        self.done[f"{kind} {strike.role}"] += 1
        if not strike.frozen_s:
            return f"killed {slot} (pid {pid})"
        self._frozen[slot.role, slot.index] = now + strike.frozen_s
        return f"froze {slot} (pid {pid}) for {strike.frozen_s:.1f} s"

    def _send(self, role: Role, index: int, number: signal.Signals) -> int:
        try:
            return self._cluster.kill(role, index, number)
        except UnavailableError:
            return 0
