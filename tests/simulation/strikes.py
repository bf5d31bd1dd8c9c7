"""Carries out the strikes of a scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from tests.simulation import calls
from tests.simulation.cluster import RESTARTED, Cluster, Started
from tests.simulation.etcd import HOST
from tests.simulation.scenario import Aim, Strike
from tests.simulation.scheduler import Process

_SLOW_S = 0.2
_ETCD_FAULT_CHANCE = 0.1
_STORE_ERROR_CHANCE = 0.3


class Striker:
    """Strikes a cluster according to its scenario, and ends all faults when the scenario says so."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        #: Strikes that found something to strike.
        self.count = 0
        #: Strikes that wait for an event.
        self._aimed: dict[Aim, list[Strike]] = {}
        #: (process, event) -> number of such events.
        self._events: Counter[tuple[str, str]] = Counter()

    def begin(self) -> None:
        """Plan all strikes."""
        scenario = self._cluster.scenario
        for strike in scenario.strikes:
            if strike.aim is None:
                self._scheduler.after(strike.at_s, partial(self._strike, strike))
                if strike.kind == "etcd back":
                    self._scheduler.after(max(strike.at_s - strike.extent, 0.0), self._cluster.etcd.back_up)
            else:
                self._aimed.setdefault(strike.aim, []).append(strike)
        if self._aimed:
            self._cluster.network.watchers.append(self._happened)
            self._cluster.store.watchers.append(self._happened)
            calls.watchers.append(self._happened)
            self._cluster.etcd.watchers.append(lambda process, _, when: self._happened(process, "transaction", when))
        if scenario.calm_after_s:
            self._scheduler.after(scenario.calm_after_s, self._calm)

    def _calm(self) -> None:
        weather = self._cluster.network.weather
        weather.breaks = weather.losses = weather.doubles = 0.0

    def _happened(self, process: Process, event: str, when: str) -> None:
        """Carry out what is aimed at this event of the process that runs now."""
        if not isinstance(process, Started):
            return
        place = process.name, event
        self._events[place] += when == "before"
        for strike in self._aimed.pop(Aim(process.role, process.index, event, self._events[place], when), ()):
            is_same = (strike.role, strike.index) == (process.role, process.index)
            self._strike(strike, process if is_same else None)
        current = self._scheduler.current
        if current is not None and (current.process.is_frozen or not current.process.is_alive):
            # It goes on when it is thawed, or never.
            self._scheduler.sleep(0.0)

    def _strike(self, strike: Strike, process: Started | None = None) -> None:
        cluster = self._cluster
        found = [process] if process is not None else cluster.alive(strike.role)
        if cluster.is_ending or not found:
            return
        process = found[strike.index % len(found)]
        cluster.say("STRIKE", f"{strike} -> {process.name}")
        self.count += 1
        acts: dict[str, Callable[[Strike, Started], None]] = {
            "kill": self._kill,
            "kill silently": self._kill_silently,
            "freeze": self._freeze,
            "terminate": self._terminate,
            "break": self._break,
            "cut": self._cut,
            "slow": self._slow,
            "lease": self._end_lease,
            "etcd down": self._stop_etcd,
            "etcd faults": self._disturb_etcd,
            "wall clock": self._turn_clock,
            "scale": self._scale,
            "mode": self._change_mode,
            "etcd back": self._restore_etcd,
            "lost request": self._lose,
            "lost reply": self._lose,
            "store slow": self._slow_store,
            "store errors": self._disturb_store,
            "store full": self._fill_store,
            "damage": self._damage,
            "no memory": self._starve,
        }
        acts[strike.kind](strike, process)

    def _kill(self, strike: Strike, process: Started) -> None:
        self._cluster.kill(process, strike.extent)

    def _kill_silently(self, strike: Strike, process: Started) -> None:
        """The machine loses power: nobody resets its connections."""
        process.on_death.clear()
        self._cluster.network.ended(process, is_silent=True)
        self._cluster.kill(process, strike.extent)

    def _freeze(self, strike: Strike, process: Started) -> None:
        if not process.is_frozen:
            self._scheduler.freeze(process)
            self._scheduler.after(strike.extent, partial(self._scheduler.thaw, process))

    def _terminate(self, _: Strike, process: Started) -> None:
        if process.role == "trainer":
            self._cluster.kill(process, 0.3)
        else:
            self._cluster.terminate(process)

    def _break(self, strike: Strike, process: Started) -> None:
        """Break some of the connections of a process."""
        chance = self._cluster.chance(f"break {strike.number}")
        self._cluster.network.sever(
            lambda call: process in (call.client, call.server) and chance.random() < strike.extent
        )

    def _others(self, strike: Strike, process: Started) -> list[str]:
        if strike.other == HOST:
            return [HOST]
        return [each.host for each in self._cluster.alive(strike.other) if each is not process]

    def _cut(self, strike: Strike, process: Started) -> None:
        """Hold all messages from a machine to some others, not those in the other direction."""
        for host in self._others(strike, process):
            self._cluster.network.link(process.host, host).cut_until = self._scheduler.now + strike.extent

    def _slow(self, strike: Strike, process: Started) -> None:
        for host in self._others(strike, process):
            link = self._cluster.network.link(process.host, host)
            link.slow_s = _SLOW_S
            self._scheduler.after(strike.extent, partial(setattr, link, "slow_s", 0.0))

    def _end_lease(self, _: Strike, process: Started) -> None:
        """End the leases of a process without telling it, as an etcd that was paused for long does."""
        store = self._cluster.etcd.store
        mark = f'"pid":{process.pid}'.encode()
        for lease in sorted({entry.lease_id for entry in store.entries.values() if mark in entry.value}):
            store.end(lease)

    def _stop_etcd(self, strike: Strike, _: Started) -> None:
        self._cluster.etcd.down_until = self._scheduler.now + strike.extent

    def _disturb_etcd(self, strike: Strike, _: Started) -> None:
        self._cluster.etcd.fault_chance = _ETCD_FAULT_CHANCE
        self._scheduler.after(strike.extent, partial(setattr, self._cluster.etcd, "fault_chance", 0.0))

    def _lose(self, strike: Strike, _: Started) -> None:
        """Lose the request to etcd that the current thread is about to send, or the reply to it."""
        is_reply = strike.kind == "lost reply"
        self._cluster.etcd.planned[self._scheduler.current] = "lost_reply" if is_reply else "lost_request"

    def _change_mode(self, strike: Strike, _: Started) -> None:
        self._cluster.start("mode", int(strike.extent))

    def _restore_etcd(self, strike: Strike, _: Started) -> None:
        """Restore etcd from a backup, as another cluster. A while later, an operator starts all processes again.

        Without a checkpoint, no job could continue.
        """
        has_checkpoint = any(name.endswith("manifest.json") for name in self._cluster.store.files)
        if has_checkpoint and self._cluster.etcd.go_back(strike.extent):
            self._cluster.has_gone_back = True
            self._scheduler.after(1.0, self._start_again)

    def _start_again(self) -> None:
        for process in [each for each in self._cluster.processes if each.is_alive and each.role in RESTARTED]:
            self._cluster.kill(process, 0.2)

    def _scale(self, strike: Strike, _: Started) -> None:
        self._cluster.scale(int(strike.extent))

    def _slow_store(self, strike: Strike, _: Started) -> None:
        self._for_a_while("slow_s", strike.extent / 2, strike.extent)

    def _disturb_store(self, strike: Strike, _: Started) -> None:
        self._for_a_while("error_chance", _STORE_ERROR_CHANCE, strike.extent)

    def _fill_store(self, strike: Strike, _: Started) -> None:
        self._for_a_while("is_full", True, strike.extent)

    def _for_a_while(self, name: str, value: float, seconds: float) -> None:
        store = self._cluster.store
        if not getattr(store, name):
            setattr(store, name, value)
            self._scheduler.after(seconds, partial(setattr, store, name, type(value)()))

    def _damage(self, strike: Strike, _: Started) -> None:
        """Damage a file in the store: change a byte, or cut the file."""
        chance = self._cluster.chance(f"damage {strike.number}")
        store = self._cluster.store
        sound = [path for path, data in sorted(store.files.items()) if data and path not in store.damaged]
        if sound:
            store.damage(chance.choice(sound), is_torn=chance.random() < strike.extent, place=chance.random())

    def _starve(self, _: Strike, process: Started) -> None:
        """Let the function that the running thread calls fail for lack of memory."""
        raise MemoryError(f"none for {process.name}")

    def _turn_clock(self, strike: Strike, process: Started) -> None:
        process.wall_offset_s += strike.extent
