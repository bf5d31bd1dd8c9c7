"""What a pserver's blocks went through, in figures: counted where it happens, read by ``status`` and by Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from flightedl.domain.pserver.block_values import Effect, EmptyRound, Update
from flightedl.messages.parameters import Outcome
from flightedl.ports import Instruments, Measure
from flightedl.pserver.stores import Pushed
from flightedl.wire.parts import ReceivedBlocks

_TIMES_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

PUSH_SECONDS = Measure("push_seconds", "To take one message of a step: to check it, add it up, update.", _TIMES_S)
STEP_SECONDS = Measure("step_seconds", "A step, from its first message to its last answer; waits included.", _TIMES_S)
ROUND_SECONDS = Measure("round_seconds", "From the closing of one round to the closing of the next.", _TIMES_S)
STALENESS = Measure(
    "staleness_updates", "Updates that a gradient did not see.", (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
)
MEASURES = (PUSH_SECONDS, STEP_SECONDS, ROUND_SECONDS, STALENESS)
#: How much the newest gradient counts in the mean of its sender's staleness.
_NEWEST = 0.1


class Meter:
    """The figures of one pserver. Thread-safe.

    Args:
        instruments: Take what is measured again and again.
        now: The process's clock.
    """

    def __init__(self, instruments: Instruments | None = None, now: Callable[[], float] = lambda: 0.0) -> None:
        #: None: nothing is measured again and again.
        self.instruments = instruments
        self.now = now
        self._lock = threading.Lock()
        self._messages = 0
        #: By the number of the outcome.
        self._rows = [0] * (max(Outcome) + 1)
        self._received_bytes = 0
        self._sent_bytes = 0
        #: Streams of steps that are open, and those of them that share memory.
        self._streams = self._shared_streams = 0
        #: (member, whether it shares memory) -> its streams.
        self._streams_of: Counter[tuple[int, bool]] = Counter()
        self._round_closed_at: float | None = None
        #: Member -> updates that its gradients did not see: a mean in which newer ones count more.
        self._staleness: dict[int, float] = {}
        #: What the blocks wait for, as it was last looked at, and since when.
        self._waits: tuple[object, float] = (None, 0.0)

    # what happens

    def message(self, seconds: float, parts: Iterable[ReceivedBlocks], answers: Iterable[Pushed]) -> None:
        """Count a message of a push or a step: its parts, and what became of them within ``seconds``."""
        with self._lock:
            self._messages += 1
            for part in parts:
                self._received_bytes += len(part.data)
            for answer in answers:
                piece = answer.piece
                self._rows[piece.outcome] += len(piece.blocks)
                if piece.values is not None:
                    self._sent_bytes += piece.values.nbytes
        if self.instruments is not None:
            self.instruments.observe(PUSH_SECONDS, seconds)

    def sent(self, size_bytes: int) -> None:
        """Values left that were waited for."""
        with self._lock:
            self._sent_bytes += size_bytes

    def stream(self, more: int, *, shared: int = 0) -> None:
        """So many more streams of steps are open, and share memory; negative: so many fewer."""
        with self._lock:
            self._streams += more
            self._shared_streams += shared

    def stream_of(self, member: int, more: int, *, is_shared: bool) -> None:
        """So many more streams are known to be of this member; negative: so many fewer."""
        with self._lock:
            self._streams_of[member, is_shared] += more

    def step(self, seconds: float) -> None:
        """A step is over."""
        if self.instruments is not None:
            self.instruments.observe(STEP_SECONDS, seconds)

    def updates(self, effects: Sequence[Effect], base_version: int, member: int) -> None:
        """What a member's push did to the first of this pserver's blocks; the others do as it does."""
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

    # what is asked

    @property
    def messages(self) -> int:
        """Of pushes and steps."""
        return self._messages

    @property
    def rows_by_outcome(self) -> dict[str, int]:
        """Blocks that were pushed, by what became of them."""
        with self._lock:
            return {outcome.name.lower(): self._rows[outcome] for outcome in Outcome if outcome is not Outcome.NONE}

    @property
    def streams(self) -> tuple[int, int]:
        """Streams of steps that are open, and how many of them share memory with a trainer."""
        return self._streams, self._shared_streams

    def shares_memory(self) -> dict[int, bool]:
        """Members that have a stream, and whether their values lie in memory that both sides map."""
        with self._lock:
            self._streams_of = +self._streams_of
            return {member: not self._streams_of[member, False] for member, _ in self._streams_of if member}

    @property
    def size_bytes(self) -> tuple[int, int]:
        """(received, sent) bytes of values."""
        return self._received_bytes, self._sent_bytes

    def staleness(self, members: Collection[int]) -> dict[int, float]:
        """Updates that the newest gradients of members did not see; of others it is forgotten."""
        for gone in self._staleness.keys() - members:
            self._staleness.pop(gone, None)
        return dict(self._staleness)

    def waits_s(self, what: object) -> float:
        """For how long this has been the answer whenever it was asked what the blocks wait for."""
        now = self.now()
        with self._lock:
            if self._waits[0] != what:
                self._waits = (what, now)
            return now - self._waits[1]
