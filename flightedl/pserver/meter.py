"""Counters of a pserver's pushes, steps, rounds and streams, shown by ``status`` and Prometheus."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from flightedl.domain.pserver.block_values import Effect, EmptyRound, Update
from flightedl.messages.parameters import Outcome
from flightedl.ports import Instruments, Measure
from flightedl.pserver.stores.interface import Pushed
from flightedl.wire.parts import ReceivedBlocks

_TIMES_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

PUSH_SECONDS = Measure("push_seconds", "Time to process one message of a step.", _TIMES_S)
STEP_SECONDS = Measure("step_seconds", "Time from a step's first message to its last answer, with waits.", _TIMES_S)
ROUND_SECONDS = Measure("round_seconds", "Time between the ends of two rounds.", _TIMES_S)
STALENESS = Measure(
    "staleness_updates", "Updates that a gradient missed.", (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
)
MEASURES = (PUSH_SECONDS, STEP_SECONDS, ROUND_SECONDS, STALENESS)
#: Weight of the newest gradient in the moving average of a member's staleness.
_NEWEST = 0.1
#: Maximum number of ranges of blocks that are counted, and that are reported.
_RANGES_LIMIT, _REPORTED_RANGES = 1024, 128


class Meter:
    """Counters of one pserver. Thread-safe.

    Args:
        instruments: Histograms; None to record none.
        now: The process's clock.
    """

    def __init__(self, instruments: Instruments | None = None, now: Callable[[], float] = lambda: 0.0) -> None:
        self.instruments = instruments
        self.now = now
        self._lock = threading.Lock()
        self._messages = 0
        #: Number of pushed blocks, indexed by the outcome's number.
        self._rows = [0] * (max(Outcome) + 1)
        self._received_bytes = 0
        #: Range of blocks -> number of parts with values, and their bytes.
        self._pushed: dict[range, list[int]] = {}
        self._sent_bytes = 0
        #: Number of open streams for steps; number of those that use shared memory.
        self._streams = self._shared_streams = 0
        #: (member, True if the streams use shared memory) -> number of such streams.
        self._streams_of: Counter[tuple[int, bool]] = Counter()
        self._round_closed_at: float | None = None
        #: Member -> exponential moving average of the staleness of its gradients.
        self._staleness: dict[int, float] = {}
        #: Argument ``what`` of the latest call of ``waits_s``, and time of the first call in a row with this argument.
        self._waits: tuple[object, float] = (None, 0.0)

    # recording

    def message(self, seconds: float, parts: Iterable[ReceivedBlocks], answers: Iterable[Pushed]) -> None:
        """Count one message of a push or step, with its parts and answers. Processing it took ``seconds``."""
        with self._lock:
            self._messages += 1
            for part in parts:
                if not (size_bytes := len(part.data)):
                    continue
                self._received_bytes += size_bytes
                counts = self._pushed.get(part.blocks)
                if counts is not None:
                    counts[0] += 1
                    counts[1] += size_bytes
                elif len(self._pushed) < _RANGES_LIMIT:
                    self._pushed[part.blocks] = [1, size_bytes]
            for answer in answers:
                piece = answer.piece
                self._rows[piece.outcome] += len(piece.blocks)
                if piece.values is not None:
                    self._sent_bytes += piece.values.nbytes
        if self.instruments is not None:
            self.instruments.observe(PUSH_SECONDS, seconds)

    def sent(self, size_bytes: int) -> None:
        """Count values that were sent later than the answer to the request for them."""
        with self._lock:
            self._sent_bytes += size_bytes

    def stream(self, more: int, *, shared: int = 0) -> None:
        """Change the number of open streams for steps, and the number of those with shared memory, by these amounts."""
        with self._lock:
            self._streams += more
            self._shared_streams += shared

    def stream_of(self, member: int, more: int, *, is_shared: bool) -> None:
        with self._lock:
            self._streams_of[member, is_shared] += more

    def step(self, seconds: float) -> None:
        if self.instruments is not None:
            self.instruments.observe(STEP_SECONDS, seconds)

    def updates(self, effects: Sequence[Effect], base_version: int, member: int) -> None:
        """Count the effects of a member's push on this pserver's first block, as a sample of all blocks."""
        for effect in effects:
            if isinstance(effect, Update) and not effect.is_of_round:
                unseen = effect.from_version - base_version
                if self.instruments is not None:
                    self.instruments.observe(STALENESS, unseen)
                before = self._staleness.get(member, unseen)
                self._staleness[member] = before + _NEWEST * (unseen - before)
            elif isinstance(effect, Update | EmptyRound):
                now = self.now()
                if self._round_closed_at is not None and self.instruments is not None:
                    self.instruments.observe(ROUND_SECONDS, now - self._round_closed_at)
                self._round_closed_at = now

    def blocks_moved(self) -> None:
        """Count the bytes of each range again from zero, because trainers will push other ranges."""
        with self._lock:
            self._pushed.clear()

    # reading

    @property
    def pushed(self) -> list[tuple[int, int, int, int]]:
        """First block, number of blocks, received parts and their bytes, for the ranges with the most bytes."""
        with self._lock:
            found = [(blocks.start, len(blocks), parts, size) for blocks, (parts, size) in self._pushed.items()]
        return heapq.nlargest(_REPORTED_RANGES, found, key=lambda each: each[3])

    @property
    def messages(self) -> int:
        return self._messages

    @property
    def rows_by_outcome(self) -> dict[str, int]:
        with self._lock:
            return {outcome.name.lower(): self._rows[outcome] for outcome in Outcome if outcome is not Outcome.NONE}

    @property
    def streams(self) -> tuple[int, int]:
        """Number of open streams for steps, and number of those that share memory with a trainer."""
        return self._streams, self._shared_streams

    def shares_memory(self) -> dict[int, bool]:
        """Return the members with open streams. The value is True if all of a member's streams share memory."""
        with self._lock:
            self._streams_of = +self._streams_of
            return {member: not self._streams_of[member, False] for member, _ in self._streams_of if member}

    @property
    def size_bytes(self) -> tuple[int, int]:
        return self._received_bytes, self._sent_bytes

    def staleness(self, members: Collection[int]) -> dict[int, float]:
        """Return the mean staleness of each member's recent gradients. Drop members that have left."""
        for gone in self._staleness.keys() - members:
            self._staleness.pop(gone, None)
        return dict(self._staleness)

    def waits_s(self, what: object) -> float:
        """Return how many seconds the blocks have been waiting for ``what``."""
        now = self.now()
        with self._lock:
            if self._waits[0] != what:
                self._waits = (what, now)
            return now - self._waits[1]
