"""A hostile trainer process that keeps changing the shared gradients while it steps.

    python -m tests.client.spoiling_trainer '{"address": ..., "plan_hash": ..., "blocks": [[number, size], ...]}'

It prints how many of its steps were accepted, and how many were rejected. Gradients are integers, and sometimes invalid
numbers.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.client.model.step_channel import StepChannel
from flightedl.errors import GradientError
from flightedl.messages.base import encode
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.rpc import Connection, ServerIdentity
from flightedl.wire.parts import STEP_END
from flightedl.wire.rows import OutgoingBlocks

CLOCK = SystemClock()


class Spoiler(threading.Thread):
    """Thread that overwrites all shared memory, alternating between valid and invalid numbers."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(daemon=True)
        self._count = size_bytes // 4
        self.memory: np.ndarray | None = None
        self.is_over = False
        self.writes = 0

    def run(self) -> None:
        """Overwrite the memory until the trainer stops."""
        sound = np.ones(self._count, np.float32)
        spoilt = sound.copy()
        spoilt[:: 4096 // 4] = np.nan
        while not self.is_over:
            memory = self.memory
            if memory is None:
                time.sleep(0.0001)
                continue
            for values in (spoilt, sound):
                np.copyto(memory.view(np.float32)[: self._count], values)
            self.writes += 1
            if self.writes % 8 == 0:
                # Sometimes the numbers stay valid for a while, so that some steps are accepted.
                time.sleep(0.01)


def main(options: dict[str, Any]) -> None:
    """Step for some seconds, and until some steps were accepted and others rejected."""
    blocks: list[tuple[int, int]] = options["blocks"]
    connection = Connection(options["address"], expected=ServerIdentity(**options["identity"]), shares_memory=True)
    spoiler = Spoiler(sum(4 * size for _, size in blocks))
    spoiler.start()
    accepted = rejected = 0
    started = time.monotonic()
    channel = StepChannel(0, CLOCK, step_bytes=1 << 30)
    while (passed_s := time.monotonic() - started) < options["seconds"] or (
        passed_s < 40 and not (accepted and rejected)
    ):
        header = PushHeader(
            trainer="t1",
            generation=1,
            plan_hash=options["plan_hash"],
            member=1,
            identity=BatchIdentity(epoch=0, task=accepted + rejected, batch=0, batch_count=1),
            weight=1.0,
            rows=len(blocks),
        )
        pieces = [OutgoingBlocks(range(n, n + 1), 0, 0, np.ones(size, np.float32), ()) for n, size in blocks]
        try:
            _step(channel, connection, pieces, encode(header), spoiler)
            accepted += 1
        except GradientError:
            rejected += 1
        finally:
            spoiler.memory = None
    spoiler.is_over = True
    spoiler.join()
    channel.close_idle()
    connection.close()
    print(json.dumps({"taken": accepted, "refused": rejected, "writes": spoiler.writes}))


def _step(
    channel: StepChannel, connection: Connection, pieces: list[OutgoingBlocks], request: bytes, spoiler: Spoiler
) -> None:
    stream = channel.begin(connection, timeout_s=10.0)
    try:
        assert stream._pair is not None, "values travel by TCP"
        spoiler.memory = stream._pair.own.values
        stream.send(pieces, request, checksums=False)
        while stream.receive()[1] != STEP_END:
            pass
    except BaseException as error:
        channel.end(stream, error)
        raise
    channel.end(stream)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
