"""A trainer process that is lent the values of a step and then stalls.

    python -m tests.client.stalling_trainer '{"address": ..., "plan_hash": ..., "blocks": [[number, size], ...]}'

It prints the number of bytes that it was lent, and sleeps. A line of input wakes it. It then prints the values that it
sees, and whether the pserver has reclaimed them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.client.model.step_channel import StepChannel
from flightedl.messages.base import encode
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.rpc import Connection, ServerIdentity
from flightedl.wire.rows import OutgoingBlocks

CLOCK = SystemClock()


def main(options: dict[str, Any]) -> None:
    """Step until the first answer arrives."""
    connection = Connection(options["address"], expected=ServerIdentity(**options["identity"]), shares_memory=True)
    channel = StepChannel(0, CLOCK, step_bytes=0, ahead=2)
    header = PushHeader(
        trainer="t1",
        generation=1,
        plan_hash=options["plan_hash"],
        member=1,
        identity=BatchIdentity(epoch=0, task=1, batch=0, batch_count=1),
        weight=1.0,
        rows=len(options["blocks"]),
        pull=True,
    )
    pieces = [[OutgoingBlocks(range(n, n + 1), 0, 0, np.ones(size, np.float32), ())] for n, size in options["blocks"]]
    stream = channel.begin(connection, timeout_s=60.0)
    assert stream._pair is not None
    store = stream._pair.store
    assert store is not None
    request = encode(header)
    for message in pieces:
        if not stream.is_full:
            stream.send(message, request, checksums=False)
            request = b""
    parts, _ = stream.receive()
    values = np.frombuffer(parts[0].data, np.float32)
    assert np.shares_memory(values, store.values)
    print(values.nbytes, flush=True)
    sys.stdin.readline()
    print(json.dumps([sorted(set(values.tolist())), stream._pair.other.is_over]), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
