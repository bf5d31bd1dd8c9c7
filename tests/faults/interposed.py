"""Proxies between the processes of a job and its servers, inserted by changing the servers' published addresses."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from typing import Any, Self

import msgspec

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.coordination.keys import JobKeys
from flightedl.errors import FlightedlError
from flightedl.ports import ModifiedAt, Put
from tests.support.proxy import TcpProxy

KINDS = ("cut", "cut after request", "delay", "half open", "flip")


class Interposer:
    """Interposer of one proxy before each master and pserver of a job.

    An address is changed under the key's own lease, so that the key keeps its generation, which is the fence.
    """

    def __init__(self, etcd: str, job: str, seed: int = 0) -> None:
        self._keys = JobKeys(job)
        self._coordinator = EtcdCoordinator(etcd, clock=SystemClock())
        self._stack = contextlib.ExitStack()
        self._proxies: dict[str, TcpProxy] = {}
        self._stop = threading.Event()
        self._random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self._threads = [threading.Thread(target=work) for work in (self._follow, self._rage)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._stack.close()
        self._coordinator.close()

    def _follow(self) -> None:
        while not self._stop.wait(0.1):
            with contextlib.suppress(FlightedlError):
                for entry in self._coordinator.list(self._keys.prefix).entries:
                    is_server = entry.key == self._keys.master_address or entry.key.startswith(self._keys.pservers)
                    if is_server and entry.lease_id:
                        self._replace(entry)

    def _replace(self, entry: Any) -> None:
        record = msgspec.json.decode(entry.value)
        if record["address"] in {proxy.address for proxy in self._proxies.values()}:
            return
        if record["address"] not in self._proxies:
            self._proxies[record["address"]] = self._stack.enter_context(TcpProxy(record["address"]))
        record["address"] = self._proxies[record["address"]].address
        self._coordinator.transact(
            [ModifiedAt(entry.key, entry.mod_revision)], [Put(entry.key, msgspec.json.encode(record), entry.lease_id)]
        )

    def _rage(self) -> None:
        while not self._stop.wait(self._random.expovariate(2.0)):
            proxies = list(self._proxies.values())
            if not proxies:
                continue
            kind, proxy = self._random.choice(KINDS), self._random.choice(proxies)
            strike(proxy, kind, self._random)
            self.done[kind] += 1


def strike(proxy: TcpProxy, kind: str, chance: random.Random) -> None:
    """Inject one fault, and heal it before returning if it would last."""
    if kind == "cut":
        proxy.cut()
    elif kind == "cut after request":
        proxy.cut_after_request()
    elif kind == "flip":
        proxy.flip_bit(chance.choice((64, 1024, 8192)))
    elif kind == "delay":
        proxy.delay(chance.uniform(0.05, 0.3))
        time.sleep(0.5)
        proxy.heal()
    else:
        proxy.half_open()
        time.sleep(chance.uniform(0.3, 3.0))
        proxy.heal()
