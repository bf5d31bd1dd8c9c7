"""The mixed storm: a ledger run while its processes are killed and frozen at random; it has to end exact.

In full, by hand (with Debian's etcd, which loses nothing when it is killed, on the path)::

    python tests/faults/storm.py --mode sync --directory /tmp/storm --roles trainer,pserver,master,etcd --records 60000
    python tests/faults/storm.py --mode async --directory /tmp/storm --roles trainer,pserver,master,etcd --s3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flightedl.testing.s3_server import S3Server

_MODULES = {
    "trainer": "flightedl.launch.trainer",
    "pserver": "flightedl.pserver",
    "master": "flightedl.master",
    "etcd": "etcd",
}


@dataclass
class Storm:
    """What is done to one run, and what came of it."""

    directory: Path
    mode: str = "sync"
    kills: int = 10
    stops: int = 0
    roles: tuple[str, ...] = ("trainer", "pserver", "master")
    trainers: int = 3
    pservers: int = 2
    records: int = 20_000
    epochs: int = 3
    pause_s: float = 0.02
    #: Mean time between faults.
    every_s: float = 1.5
    lease_s: float = 2.0
    checkpoint: str = ""
    checkpoint_every_s: float = 2.0
    seed: int = 0
    limit_s: float = 1200.0
    done: Counter[str] = field(default_factory=Counter)

    def command(self) -> list[str]:
        """What is run."""
        return [
            *(sys.executable, "-m", "flightedl", "run", "flightedl.examples.ledger"),
            *("--trainers", str(self.trainers), "--pservers", str(self.pservers), "--output", "out"),
            *("--lease-ttl-s", str(self.lease_s), "--checkpoint", self.checkpoint or str(self.directory / "ck")),
            *("--", "--mode", self.mode, "--records", str(self.records), "--epochs", str(self.epochs)),
            *("--pause", str(self.pause_s), "--per-task", "200"),
        ]

    def run(self) -> tuple[int, str]:
        """Run it to the end; exit code and output."""
        chance = random.Random(self.seed)
        environment = {
            **os.environ,
            "FLIGHTEDL_CHECKPOINT_EVERY_S": str(self.checkpoint_every_s),
            "FLIGHTEDL_LOG_LEVEL": os.environ.get("FLIGHTEDL_LOG_LEVEL", "INFO"),
        }
        log = (self.directory / "log").open("w")
        began = time.monotonic()
        with subprocess.Popen(
            self.command(), cwd=self.directory, stdout=log, stderr=subprocess.STDOUT, env=environment
        ) as process:
            try:
                self._rage(process, chance, began)
                code = process.wait(max(1.0, self.limit_s - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait(15)
                code = -1
            finally:
                if process.poll() is None:
                    process.kill()
        log.close()
        return code, (self.directory / "log").read_text()

    def _rage(self, process: subprocess.Popen[bytes], chance: random.Random, began: float) -> None:
        faults = ["kill"] * self.kills + ["stop"] * self.stops
        chance.shuffle(faults)
        self._wait_for(process, began, "epoch 1/")
        time.sleep(2.0)
        for fault in faults:
            time.sleep(chance.expovariate(1 / self.every_s))
            role = chance.choice(self.roles)
            found = self._find(process, role)
            if process.poll() is not None or time.monotonic() - began > self.limit_s:
                return
            if not found:
                continue
            victim = chance.choice(found)
            try:
                if fault == "kill":
                    victim.kill()
                else:
                    victim.suspend()
                    time.sleep(chance.uniform(0.2, 2.5 * self.lease_s))
                    victim.resume()
                self.done[f"{fault} {role}"] += 1
            except psutil.NoSuchProcess:
                continue

    def _wait_for(self, process: subprocess.Popen[bytes], began: float, text: str) -> None:
        while text not in (self.directory / "log").read_text() and process.poll() is None:
            if time.monotonic() - began > 90:
                raise TimeoutError((self.directory / "log").read_text())
            time.sleep(0.2)

    @staticmethod
    def _find(process: subprocess.Popen[bytes], role: str) -> list[psutil.Process]:
        found = []
        try:
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    command = child.cmdline()
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
                if role == "etcd":
                    matches = bool(command) and Path(command[0]).name == "etcd"
                else:
                    matches = _MODULES[role] in command
                if matches:
                    found.append(child)
        except psutil.NoSuchProcess:
            return []
        return found


def verdict(output: str) -> tuple[int, int] | None:
    """(lost, double) as the ledger counted them."""
    found = re.findall(r"ledger: \d+ records x \d+ epochs: (\d+) lost, (\d+) double", output)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def main() -> int:
    """One storm by hand."""
    parser = argparse.ArgumentParser()
    for name, default in (("kills", 60), ("stops", 20), ("records", 20_000), ("epochs", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default_s in (("every", 1.5), ("pause", 0.02), ("lease", 2.0), ("limit", 1200.0)):
        parser.add_argument(f"--{name}", type=float, default=default_s)
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--roles", default="trainer,pserver,master")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--s3", action="store_true", help="keep checkpoints on a real S3 server, started for the storm")
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if chosen.s3:
            server = stack.enter_context(S3Server())
            os.environ.update(server.environment)
            server.make_bucket("storm")
            chosen.checkpoint = "s3://storm/ck"
        return one(chosen)


def one(chosen: argparse.Namespace) -> int:
    """Run it and tell how it went; its exit code."""
    chosen.directory.mkdir(parents=True, exist_ok=True)
    storm = Storm(
        chosen.directory.absolute(),
        chosen.mode,
        chosen.kills,
        chosen.stops,
        tuple(chosen.roles.split(",")),
        records=chosen.records,
        epochs=chosen.epochs,
        pause_s=chosen.pause,
        every_s=chosen.every,
        lease_s=chosen.lease,
        checkpoint=chosen.checkpoint,
        seed=chosen.seed,
        limit_s=chosen.limit,
    )
    began = time.monotonic()
    code, output = storm.run()
    result = {
        "mode": storm.mode,
        "exit": code,
        "verdict": verdict(output),
        "faults": dict(storm.done),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result), flush=True)
    if code:
        print(output[-3000:])
    return code


if __name__ == "__main__":
    sys.exit(main())
