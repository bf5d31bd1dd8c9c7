"""Links between simulated machines, and connections over them: delays, cuts, losses and breaks.

A message of a link arrives after a random delay, in the order of its direction. A link that is cut in one direction
holds its messages until it is mended, as TCP repeats them. A lost message is never repeated: the connection is dead,
but neither end learns of it. A broken connection fails at both ends.

Each link has a source of chance of its own.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import flight

from tests.simulation.scheduler import Process, Scheduler, Thread

#: Unread bytes of one direction of a call, beyond which its writer waits. gRPC's window.
_WINDOW_BYTES = 64 << 10
_FIRST_PORT = 30_001


@dataclass(slots=True)
class Weather:
    """Faults that can happen on any link.

    Args:
        tail: Probability that a message is late.
        tail_s: Maximum delay of a late message.
        breaks: Probability that a message breaks its connection.
        losses: Probability that a message is lost, and all later ones of its connection with it.
        doubles: Probability that a call arrives a second time, later.
    """

    tail: float = 0.02
    tail_s: float = 0.1
    breaks: float = 0.0
    losses: float = 0.0
    doubles: float = 0.0


class Link:
    """One direction of the way between two machines."""

    def __init__(self, network: Network, chance: random.Random) -> None:
        self._network = network
        self.chance = chance
        #: Messages that are sent earlier than this arrive after it.
        self.cut_until = 0.0
        #: Additional delay of each message.
        self.slow_s = 0.0

    def delay_s(self) -> float:
        """Return the time that a message takes."""
        weather, draw = self._network.weather, self.chance.random()
        late = draw < weather.tail
        delay_s = self.chance.random() * weather.tail_s if late else 0.0001 + draw * 0.0004
        return delay_s + self.slow_s + max(self.cut_until - self._network.scheduler.now, 0.0)

    def breaks(self) -> bool:
        """Draw whether a message breaks its connection."""
        breaks = self._network.weather.breaks
        return breaks > 0 and self.chance.random() < breaks

    def loses(self) -> bool:
        """Draw whether a message is lost."""
        losses = self._network.weather.losses
        return losses > 0 and self.chance.random() < losses

    def doubles(self) -> bool:
        """Draw whether a call arrives twice."""
        doubles = self._network.weather.doubles
        return doubles > 0 and self.chance.random() < doubles


class Server(Protocol):
    """A Flight server, as the network sees it."""

    process: Process
    is_closed: bool


class Network:
    """All links, servers and calls of one simulation."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.weather = Weather()
        self.servers: dict[tuple[str, int], Any] = {}
        #: Calls in progress, in the order of their beginning.
        self.calls: dict[Connected, None] = {}
        #: Calls that their clients have given up, which their servers have not learned of.
        self.given_up: dict[Connected, None] = {}
        self.message_count = 0
        #: Number of connections that faults have broken.
        self.broken_count = 0
        #: Called before and after each message, for faults that are aimed at messages.
        self.watchers: list[Callable[[Process, str, str], None]] = []
        self._links: dict[tuple[str, str], Link] = {}
        self._ports = 40_000
        self._owners: dict[int, Process] = {}

    def watch(self, sender: Process, what: str, when: str) -> None:
        """Tell watchers of a message."""
        for watcher in self.watchers:
            watcher(sender, what, when)

    def port(self) -> int:
        """Return a port that nothing has used."""
        self._ports += 1
        return self._ports

    def lasting_port(self, process: Process) -> int:
        """Return a port for a server: the lowest that no live process has. So successors listen where others did."""
        taken = {port for port, owner in self._owners.items() if owner.is_alive}
        port = next(port for port in itertools.count(_FIRST_PORT) if port not in taken)
        self._owners[port] = process
        return port

    def link(self, start: str, end: str) -> Link:
        """Return the link from one machine to another."""
        if (start, end) not in self._links:
            self._links[start, end] = Link(self, self.scheduler.stream(f"link {start} {end}"))
        return self._links[start, end]

    def server_at(self, address: tuple[str, int]) -> Any:
        """Return the server that listens there, or None."""
        server = self.servers.get(address)
        return None if server is None or server.is_closed else server

    def sever(self, matches: Callable[[Connected], bool]) -> int:
        """Break the connections of calls. Return the number of calls."""
        found = [call for call in self.calls if matches(call)]
        for call in (*found, *(call for call in self.given_up if matches(call))):
            call.snap("connection reset")
            self.given_up.pop(call, None)
        return len(found)

    def ended(self, process: Process, *, is_silent: bool = False) -> None:
        """Close the sockets of a process that has ended. If its machine has lost power, its peers notice nothing."""
        for place in [place for place, server in self.servers.items() if server.process is process]:
            del self.servers[place]
        for call in [call for call in self.calls if process in (call.client, call.server)]:
            if is_silent:
                call.hang()
            else:
                peer = call.server if process is call.client else call.client
                delay_s = 0.001 if peer is None else self.link(process.host, peer.host).delay_s()
                self.scheduler.after(delay_s, lambda call=call: call.snap("the peer is gone"))  # type: ignore[misc]


class Pipe:
    """One direction of a call: messages, each with the time at which it arrives."""

    def __init__(self, call: Connected) -> None:
        self._call = call
        self._items: deque[tuple[float, int, Any]] = deque()
        self._arrives_last = 0.0
        self._unread_bytes = 0
        self._reader: Thread | None = None
        self._writer: Thread | None = None
        self.is_lost = False
        #: Raised once all messages that have arrived are read.
        self.error: BaseException | None = None

    def send(self, item: Any, size_bytes: int, link: Link, deadline: float) -> None:
        """Send a message. Wait while too much is unread."""
        network = self._call.network
        scheduler = network.scheduler
        network.message_count += 1
        sender = self._call.client if self is self._call.up else self._call.server
        if sender is not None:
            network.watch(sender, self._call.what, "before")
        while self._unread_bytes > _WINDOW_BYTES and self.error is None:
            if scheduler.now >= deadline:
                raise flight.FlightTimedOutError("Deadline Exceeded")
            self._writer = scheduler.current
            try:
                scheduler.block(deadline, "window")
            finally:
                self._writer = None
        if self.error is not None:
            return
        if link.breaks():
            network.broken_count += 1
            self._call.snap("connection lost")
            return
        self.is_lost = self.is_lost or link.loses()
        if self.is_lost:
            return
        self._unread_bytes += size_bytes
        self._arrives_last = max(self._arrives_last, scheduler.now + link.delay_s())
        self._items.append((self._arrives_last, size_bytes, item))
        if self._reader is not None:
            scheduler.wake(self._reader)
        if sender is not None:
            network.watch(sender, self._call.what, "after")

    def fail(self, error: BaseException) -> None:
        """End the pipe with this error, unless it has ended."""
        if self.error is None:
            self.error = error
        for thread in (self._reader, self._writer):
            if thread is not None:
                self._call.network.scheduler.wake(thread)

    def read(self, deadline: float) -> Any:
        """Wait for the next message and return it."""
        scheduler = self._call.network.scheduler
        while True:
            if self._items and self._items[0][0] <= scheduler.now:
                _, size_bytes, item = self._items.popleft()
                self._unread_bytes -= size_bytes
                if self._writer is not None:
                    scheduler.wake(self._writer)
                return item
            if self.error is not None:
                raise self.error
            if scheduler.now >= deadline:
                raise flight.FlightTimedOutError("Deadline Exceeded")
            self._reader = scheduler.current
            try:
                scheduler.block(
                    min(deadline, self._items[0][0]) if self._items else deadline, f"message of {self._call}"
                )
            finally:
                self._reader = None


class Connected:
    """A call over a connection: two pipes, and what ends them.

    ``down`` carries ("schema", schema), ("chunk", batch, metadata) and other answers, and then ("end", error or None).
    """

    def __init__(
        self, network: Network, client: Process, client_port: int, address: tuple[str, int], timeout_s: float
    ) -> None:
        self.network = network
        self.client = client
        self.client_port = client_port
        self.address = address
        self.server: Process | None = None
        self.deadline = network.scheduler.now + timeout_s
        self.what = ""
        self.up, self.down = Pipe(self), Pipe(self)
        self._is_cancelled = False
        self.is_over = False
        self.is_broken = False
        network.calls[self] = None

    def __str__(self) -> str:
        return f"{self.what} to port {self.address[1]}"

    @property
    def is_cancelled(self) -> bool:
        """True for the server if nobody waits for the call any more."""
        return self._is_cancelled or self.network.scheduler.now >= self.deadline

    @property
    def way_up(self) -> Link:
        return self.network.link(self.client.host, "?" if self.server is None else self.server.host)

    @property
    def way_down(self) -> Link:
        return self.network.link("?" if self.server is None else self.server.host, self.client.host)

    def snap(self, why: str) -> None:
        """Break the connection. Both ends get an error."""
        self._is_cancelled = self.is_broken = True
        self.up.fail(flight.FlightCancelledError(why))
        self.down.fail(flight.FlightUnavailableError(why))
        self.over()

    def hang(self) -> None:
        """Lose all further messages. Neither end learns of it."""
        self.up.is_lost = self.down.is_lost = True

    def cancel(self) -> None:
        """End the call at the client. The server learns of it later."""
        if self.is_over:
            return
        self._is_cancelled = True
        error = flight.FlightCancelledError("cancelled")
        if self.up.is_lost:
            self.network.given_up[self] = None
        else:
            self.network.scheduler.after(self.way_up.delay_s(), lambda: self.up.fail(error))
        self.down.fail(flight.FlightCancelledError("cancelled"))
        self.over()

    def over(self) -> None:
        """The client has nothing more to expect."""
        self.is_over = True
        self.network.calls.pop(self, None)

    def finish(self, error: BaseException | None) -> None:
        """The server's method has ended."""
        if not self.is_over:
            # The status is sent beside the window.
            self.down.send(("end", error), 0, self.way_down, float("inf"))
            if not self.down.is_lost:
                self.network.calls.pop(self, None)


def size_of(batch: pa.RecordBatch | None, metadata: bytes | None) -> int:
    """Return the bytes of a message."""
    return (0 if batch is None else batch.nbytes) + len(metadata or b"") + 64
