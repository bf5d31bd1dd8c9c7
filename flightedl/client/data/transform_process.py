"""Reader process: receives batches from a socket and applies the user's transform to them until the socket closes."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading

import pyarrow as pa

from flightedl.client.data import transforms
from flightedl.messages.base import decode


def main(descriptor: int) -> None:
    """Serve until the trainer closes its end or dies."""
    transforms.mark_reader()
    # Each reader uses one thread, because parallelism comes from the number of readers.
    pa.set_cpu_count(1)
    with socket.socket(fileno=descriptor) as connection:
        channel = transforms.Channel(connection)
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        try:
            text, _ = channel.receive()
            transform = decode(text.encode(), transforms.NamedFunction).find()
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            channel.send(transforms.described(error))
            return
        channel.send("")
        while True:
            try:
                _, batch = channel.receive()
            except EOFError:
                return
            try:
                found = transforms.apply(transform, batch)
            except Exception as error:  # noqa: BLE001 - the trainer raises it
                channel.send(transforms.described(error))
            else:
                channel.send("", found)


def _end_with(connection: socket.socket) -> None:
    """End this process, even in the middle of a batch, as soon as the trainer closes its end or dies."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)
