"""Time, network and processes of a simulated cluster: one heap of events, from one seed.

* Only events in the heap happen, and ties are broken by the order of insertion. So a run is determined by its seed.
* A *process* is alive, frozen or dead. Messages, replies and timers of a frozen process wait. When the process wakes,
  it receives them in order and continues as if nothing had happened. A dead process receives nothing.
* A *call* is a request and a reply. Either may be lost, duplicated, late, or blocked by a partition; the caller then
  gets nothing until its time limit. A dead server refuses a call immediately, like a closed port.
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
#: A function that makes a request. It calls its first argument with the answer, or its second if there is no answer.
Ask = Callable[[Reply, Action], None]
Steps = Generator[Ask, Any, Any]


class Violation(AssertionError):  # noqa: N818 - the finding of a run, not an error of the simulation
    """An invariant of the protocol is violated."""


class NoAnswerError(Exception):
    """A request got no answer."""


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """Probability of each kind of fault for a message, while faults are enabled."""

    drop: float
    duplicate: float
    delay: float
    longest_delay_s: float


class Process:
    """A process, which has a name, a place in the network, and an end."""

    #: False if its clients never send a request twice.
    is_asked_twice = True

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        #: The process's view of etcd's keys, which lags behind etcd.
        self.directory: dict[str, Any] = {}
        #: Revision of the view.
        self.directory_revision = 0
        self._inbox: deque[Action] = deque()
        #: The last state of etcd that the process has seen, with the job's life; None before the first request.
        self.witness = Witness()
        self.etcd_life: int | None = None

    def __str__(self) -> str:
        return self.name

    def reply_for(self, _source: Process, done: Reply) -> Reply:
        """Wrap a callback that receives the answer to a request from this process."""
        return done

    def end(self, why: str) -> None:
        raise NotImplementedError(why)

    def deliver(self, action: Action) -> None:
        """Run an action in the process: now, when a frozen process wakes, or never if the process is dead."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._inbox.append(action)
        else:
            action()

    def later(self, delay_s: float, action: Action) -> None:
        self.world.after(delay_s, lambda: self.deliver(action))

    def follow(self, steps: Steps) -> None:
        """Run steps. Each step yields a request, and continues with the answer or with ``NoAnswerError``."""

        def go_on(step: Callable[[Any], Ask], value: Any) -> None:
            try:
                ask = step(value)
            except StopIteration:
                return
            ask(lambda answer: go_on(steps.send, answer), lambda: go_on(steps.throw, NoAnswerError()))

        go_on(steps.send, None)

    def asks(self, server: Process, handler: Handler, argument: Any, timeout_s: float = 2.0) -> Ask:
        """Return a call of ``server`` that a step can yield."""
        return lambda done, failed: self.world.call(self, server, handler, argument, done, failed, timeout_s)

    def pauses(self, pause_s: float) -> Ask:
        return lambda done, _: self.later(pause_s, lambda: done(None))

    def freeze(self) -> None:
        """SIGSTOP."""
        self.is_frozen = True

    def wake(self) -> None:
        """Handle SIGCONT: deliver everything that has arrived since the process was frozen."""
        self.is_frozen = False
        while self._inbox and self.is_alive and not self.is_frozen:
            self._inbox.popleft()()

    def die(self) -> None:
        """End the process, by SIGKILL or by exiting."""
        self.is_alive = False
        self._inbox.clear()


class Call:
    """One request, and its reply."""

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
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._made = 0
        self._notes: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=80)
        #: Kind of fault -> number of faults of this kind so far.
        self.faults: Counter[str] = Counter()
        self.are_faults_on = True
        self.network = NetworkFaults(0.0, 0.0, 0.0, 0.0)
        #: Pairs of names that cannot reach each other. A name paired with "" is isolated from all others.
        self._cuts: set[frozenset[str]] = set()

    # time

    def after(self, delay_s: float, action: Action) -> None:
        self._made += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._made, action))

    def step(self) -> bool:
        """Run the next event. False if there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True

    # for people

    def note(self, text: str, *values: Any) -> None:
        """Record an event, which is shown if this run finds a violation."""
        self._notes.append((self.now, text, values))

    def story(self) -> Iterable[str]:
        return (f"{at:9.3f}  {text.format(*values)}" for at, text, values in self._notes)

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1

    # network

    def is_connected(self, one: Process, other: Process) -> bool:
        """True if two processes can exchange messages at the moment."""
        if not self._cuts:
            return True
        return not any(len(cut) == len(cut & {one.name, other.name, ""}) for cut in self._cuts)

    @property
    def is_parted(self) -> bool:
        return bool(self._cuts)

    def cut(self, *names: str) -> Action:
        """Disconnect two processes, or one from all others if the second is "". Return an action that undoes this."""
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
        """Call ``server``. Exactly one of ``done`` and ``failed`` is called, unless ``source`` dies."""
        call = Call(source, server, handler, argument, server.reply_for(source, done), failed)
        self.transmit(source, server, call.arrive)
        self.after(timeout_s, lambda: None if call.is_over else source.deliver(call.fail))

    def transmit(self, source: Process, target: Process, arrive: Action) -> None:
        """Send one message, which is subject to faults."""
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
        """Stop all faults and reconnect everything."""
        self.are_faults_on = False
        self._cuts.clear()
