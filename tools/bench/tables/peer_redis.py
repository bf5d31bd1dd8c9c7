"""A peer: Redis, a key for each row. MGET reads rows with their optimizer's sum, NumPy updates them, MSET writes them.

What is asked is pipelined, a few thousand keys a command. The server of its own keeps nothing on disk.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import redis

from flightedl.errors import JobFailedError
from flightedl.launch.etcd import free_ports

from ..orders import serve_choices
from .workloads import EPS, RATE, Floats, Group, Ids, gradients_of, groups_of, steps_of, workloads_of

_KEYS_A_COMMAND = 4096


def _keys(prefix: bytes, ids: Ids) -> list[bytes]:
    data = ids.tobytes()
    return [prefix + data[at : at + 8] for at in range(0, len(data), 8)]


def _pieces(keys: list[bytes]) -> range:
    return range(0, len(keys), _KEYS_A_COMMAND)


def _set(client: Any, keys: list[bytes], rows: Floats) -> None:
    data, size = rows.tobytes(), rows.shape[1] * 4
    with client.pipeline(transaction=False) as pipe:
        for first in _pieces(keys):
            some = keys[first : first + _KEYS_A_COMMAND]
            pipe.mset({key: data[(first + at) * size : (first + at + 1) * size] for at, key in enumerate(some)})
        pipe.execute()


def _get(client: Any, keys: list[bytes], dim: int) -> Floats:
    with client.pipeline(transaction=False) as pipe:
        for first in _pieces(keys):
            pipe.mget(keys[first : first + _KEYS_A_COMMAND])
        data = b"".join(value for values in pipe.execute() for value in values)
    return np.frombuffer(data, np.float32).reshape(len(keys), dim + 1)


def _fill(client: Any, group: Group, name: bytes) -> None:
    for number in range(group.tables):
        for first in range(0, group.rows_of_one, 1 << 16):
            ids = np.arange(first, min(first + (1 << 16), group.rows_of_one))
            _set(client, _keys(b"%s%d:" % (name, number), ids), np.full((len(ids), group.dim + 1), 0.01, np.float32))


class _Steps:
    """One workload."""

    def __init__(self, client: Any, name: bytes, steps: list[list[Ids]], gradients: list[Floats]) -> None:
        self._client = client
        self._name = name
        self._steps = steps
        self._gradients = gradients
        self._at = 0

    def step(self) -> None:
        """All tables' keys in one pipeline there, and one back."""
        ids = self._steps[self._at % len(self._steps)]
        self._at += 1
        dim = self._gradients[0].shape[1]
        keys: list[bytes] = []
        summed: list[Floats] = []
        places = []
        for number, (some, gradients) in enumerate(zip(ids, self._gradients, strict=True)):
            order = np.argsort(some)
            unique, first, inverse = np.unique(some[order], return_index=True, return_inverse=True)
            places.append((order, inverse + len(keys)))
            keys += _keys(b"%s%d:" % (self._name, number), unique)
            summed.append(np.add.reduceat(gradients[order], first, axis=0))
        rows = _get(self._client, keys, dim).copy()
        for order, inverse in places:
            seen = np.empty((len(order), dim), np.float32)
            seen[order] = rows[inverse, :dim]
        gradient = np.concatenate(summed)
        rows[:, dim] += np.mean(gradient * gradient, axis=1)
        rows[:, :dim] -= RATE * gradient / (np.sqrt(rows[:, dim:]) + EPS)
        _set(self._client, keys, rows)


@contextlib.contextmanager
def _server(port: int) -> Any:
    program = shutil.which("redis-server")
    if program is None:
        raise JobFailedError("there is no redis-server on PATH")
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def _connected(port: int) -> Any:
    client = redis.Redis(port=port, socket_timeout=60)
    end = time.monotonic() + 10
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return client


def main(numbers: list[list[int]]) -> None:
    """Step as ordered."""
    workloads = workloads_of(numbers)
    (port,) = free_ports(1)
    with _server(port) as pid:
        client = _connected(port)
        names = {group: b"%d-" % number for number, group in enumerate(groups_of(workloads))}
        for group, name in names.items():
            _fill(client, group, name)
        steps = [_Steps(client, names[w.group], steps_of(w), gradients_of(w)) for w in workloads]
        serve_choices([partial(one.step) for one in steps], servers=[pid])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
