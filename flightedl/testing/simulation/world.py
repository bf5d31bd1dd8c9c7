"""Time, the network and processes of a simulated cluster: everything that happens, in one heap, from one seed.

* Nothing happens but events of the heap; ties are broken by the order in which they were made. So a seed is a run.
* A *process* is alive, frozen or dead. What reaches a frozen one (messages, replies, its own timers) waits, and comes
  in order when it wakes: it goes on as if nothing had been, which is what makes it a zombie. A dead one gets nothing.
* A *call* is a request and a reply. Either may be lost, doubled, late, or cut off by a partition; then the caller hears
  nothing until its time limit. A dead server refuses at once, as a closed port does.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

from flightedl.domain.recovery.store_history import Witness

Action = Callable[[], None]
Reply = Callable[[Any], None]
Handler = Callable[[Any, Reply], None]
#: Asks somebody; one of its arguments is called: the first with the answer, or the second, if there is none.
Ask = Callable[[Reply, Action], None]
Steps = Generator[Ask, Any, Any]


class Violation(AssertionError):  # noqa: N818 - it is what a run finds, not an error of the simulation
    """An invariant of the protocol does not hold."""


class NoAnswerError(Exception):
    """Nobody has answered."""


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """How often messages meet with what, while faults are on."""

    drop: float
    duplicate: float
    delay: float
    longest_delay_s: float


class Process:
    """Something that runs somewhere: it has a name, a place in the network, and an end."""

    #: False: clients of it never send a request twice.
    is_asked_twice = True

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        #: What it knows of etcd's keys: some moments old, or older.
        self.directory: dict[str, Any] = {}
        #: Up to which revision it knows them.
        self.directory_revision = 0
        self._inbox: deque[Action] = deque()
        #: What it has seen of etcd, and in which life of the job; None: it has asked nothing yet.
        self.witness = Witness()
        self.etcd_life: int | None = None

    def __str__(self) -> str:
        return self.name

    def heard_by(self, _source: Process, done: Reply) -> Reply:
        """What becomes of this process's answer to a request."""
        return done

    def end(self, why: str) -> None:
        raise NotImplementedError(why)

    def deliver(self, action: Action) -> None:
        """Let the process do something now, when it wakes, or never."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._inbox.append(action)
        else:
            action()

    def later(self, delay_s: float, action: Action) -> None:
        self.world.after(delay_s, lambda: self.deliver(action))

    def follow(self, steps: Steps) -> None:
        """Take steps in turn: each yields a way to ask, and goes on with the answer, or with ``NoAnswerError``."""

        def go_on(step: Callable[[Any], Ask], value: Any) -> None:
            try:
                ask = step(value)
            except StopIteration:
                return
            ask(lambda answer: go_on(steps.send, answer), lambda: go_on(steps.throw, NoAnswerError()))

        go_on(steps.send, None)

    def asks(self, server: Process, handler: Handler, argument: Any, timeout_s: float = 2.0) -> Ask:
        """A call of ``server``, as a step yields it."""
        return lambda done, failed: self.world.call(self, server, handler, argument, done, failed, timeout_s)

    def pauses(self, pause_s: float) -> Ask:
        return lambda done, _: self.later(pause_s, lambda: done(None))

    def freeze(self) -> None:
        """SIGSTOP."""
        self.is_frozen = True

    def wake(self) -> None:
        """SIGCONT: whatever came meanwhile comes now."""
        self.is_frozen = False
        while self._inbox and self.is_alive and not self.is_frozen:
            self._inbox.popleft()()

    def die(self) -> None:
        """The end: kill -9, or an exit."""
        self.is_alive = False
        self._inbox.clear()


class Call:
    """One request on its way, and what becomes of it."""

    __slots__ = ("argument", "done", "failed", "handler", "is_over", "server", "source", "world")

    def __init__(
        self, source: Process, server: Process, handler: Handler, argument: Any, done: Reply, failed: Action
    ) -> None:
        self.world = source.world
        self.source = source
        self.server = server
        self.handler = handler
        self.argument = argument
        self.done = done
        self.failed = failed
        self.is_over = False

    def arrive(self) -> None:
        if not self.server.is_alive:
            self.world.after(0.001, lambda: self.source.deliver(self.fail))
        elif self.world.is_connected(self.source, self.server):
            self.server.deliver(self.handle)

    def handle(self) -> None:
        self.handler(self.argument, self.reply)

    def reply(self, value: Any) -> None:
        self.world.transmit(self.server, self.source, lambda: self.source.deliver(lambda: self.finish(value)))

    def finish(self, value: Any) -> None:
        if not self.is_over:
            self.is_over = True
            self.done(value)

    def fail(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.failed()


class World:
    """The clock, the heap, the network and the random numbers of one run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._made = 0
        self._notes: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=80)
        #: What was done to this run.
        self.faults: Counter[str] = Counter()
        self.are_faults_on = True
        self.network = NetworkFaults(0.0, 0.0, 0.0, 0.0)
        #: Pairs of names that do not hear each other; a name with "" hears nobody.
        self._cuts: set[frozenset[str]] = set()

    # time

    def after(self, delay_s: float, action: Action) -> None:
        self._made += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._made, action))

    def step(self) -> bool:
        """The next event; False: there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True

    # people

    def note(self, text: str, *values: Any) -> None:
        """Remember an event, to be shown if this run finds something."""
        self._notes.append((self.now, text, values))

    def story(self) -> Iterable[str]:
        return (f"{at:9.3f}  {text.format(*values)}" for at, text, values in self._notes)

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1

    # network

    def is_connected(self, one: Process, other: Process) -> bool:
        """Whether messages pass between two processes now."""
        if not self._cuts:
            return True
        return not any(len(cut) == len(cut & {one.name, other.name, ""}) for cut in self._cuts)

    @property
    def is_parted(self) -> bool:
        return bool(self._cuts)

    def cut(self, *names: str) -> Action:
        """Part two processes, or one ("" as the other) from all; returns what mends it."""
        pair = frozenset(names)
        self._cuts.add(pair)
        return lambda: self._cuts.discard(pair)

    def call(
        self,
        source: Process,
        server: Process,
        handler: Handler,
        argument: Any,
        done: Reply,
        failed: Action,
        timeout_s: float = 2.0,
    ) -> None:
        """Ask ``server``; exactly one of ``done`` and ``failed`` is called, unless ``source`` dies."""
        call = Call(source, server, handler, argument, server.heard_by(source, done), failed)
        self.transmit(source, server, call.arrive)
        self.after(timeout_s, lambda: None if call.is_over else source.deliver(call.fail))

    def transmit(self, source: Process, target: Process, arrive: Action) -> None:
        """One message, with all that may happen to it."""
        draw = self.random.random
        latency_s = 0.001 + 0.003 * draw()
        if self.are_faults_on:
            if not self.is_connected(source, target):
                self.fault("cut off")
                return
            chance, faults = draw(), self.network
            if chance < faults.drop:
                self.fault("dropped")
                return
            chance -= faults.drop
            if chance < faults.duplicate and target.is_asked_twice:
                self.fault("doubled")
                self.after(latency_s + draw() * faults.longest_delay_s, arrive)
            elif chance - faults.duplicate < faults.delay:
                self.fault("delayed")
                latency_s += draw() * faults.longest_delay_s
        self.after(latency_s, arrive)

    def calm(self) -> None:
        """No more faults: what is cut is mended."""
        self.are_faults_on = False
        self._cuts.clear()
