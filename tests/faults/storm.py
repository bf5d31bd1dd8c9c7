"""The mixed storm: a ledger run whose processes are killed and frozen, sometimes two at once. It must end exact.

To run full storms by hand, with Debian's etcd, which survives kills, on the path::

    python -m tests.faults.storm --mode sync --directory /tmp/storm --records 60000
    python -m tests.faults.storm --mode async --directory /tmp/storm --s3
    python -m tests.faults.storm --series --directory /tmp/storms

To strike two processes at once, with tasks of 200 batches that are read no faster than they are trained::

    python -m tests.faults.storm --mode async --directory /tmp/storm --kills 0 --stops 0 --strike trainer+master=4 \\
        --strike trainer+pserver=4 --lease 10 --records 5000 --per-task 1000 --batch-size 5 --pause 0.05

To restore etcd from an outdated backup. The job must stop, and must end exact when it is resumed from its checkpoints::

    python -m tests.faults.storm --mode async --directory /tmp/storm --kills 4 --stops 0 --old-etcd --epochs 9

A pair of faults may reveal what a single fault does not, for example when a trainer that wakes without its lease meets
a new master. ``strikes.STRIKES`` lists all strikes. A storm that ends inexact prints its strikes with their times, and
which records of which epoch are wrong. Logs remain in its directory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flightedl.examples.ledger import MODES, batch_sizes
from flightedl.launch.forking import ForkServer
from flightedl.recording.account import account
from flightedl.recording.reader import recordings_in
from flightedl.recording.writer import SUFFIX
from tests.support.etcd_server import EtcdServer
from tests.support.marks import left_in, report
from tests.support.s3_server import S3Server

from ..launch.forked_launcher import ForkedCommand
from . import reading_ledger
from .reads import findings
from .stored import stored_findings
from .strikes import STRIKES, Victims


@dataclass
class Storm:
    """One run with its strikes and its result."""

    directory: Path
    mode: str = "sync"
    kills: int = 10
    stops: int = 0
    roles: tuple[str, ...] = ("trainer", "pserver", "master")
    #: Name in ``STRIKES`` -> number of strikes, in addition to kills and stops.
    strikes: Mapping[str, int] = field(default_factory=dict)
    trainers: int = 3
    pservers: int = 2
    records: int = 20_000
    per_task: int = 200
    batch_size: int = 20
    epochs: int = 3
    pause_s: float = 0.02
    read_pause_s: float = 0.0
    optimizer: str = "sgd"
    #: Seconds after which ``model.step`` raises and the script catches the error; 0 disables this.
    swallow_after_s: float = 0.0
    #: True to count in rows of embedding tables, too.
    tables: bool = False
    wide_ids: int = 0
    #: Mean time between faults.
    every_s: float = 1.5
    lease_s: float = 2.0
    checkpoint: str = ""
    checkpoint_every_s: float = 2.0
    seed: int = 0
    limit_s: float = 1200.0
    #: etcd to use instead of the launcher's own. At the end of the storm it is restored from a backup made half-way.
    etcd: EtcdServer | None = None
    #: Directory for recordings of all processes; empty disables recording.
    record: str = ""
    #: True to check what trainers read, too; needs ``record``.
    reads: bool = False
    #: Fork server for the launcher; None starts a program.
    forks: ForkServer | None = None
    done: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)

    @property
    def marks(self) -> Path:
        """Directory of the marks that the storm's processes have reached."""
        return self.directory / "marks"

    def arguments(self, *more: str) -> list[str]:
        """Return the arguments of ``flightedl``."""
        return [
            *("run", reading_ledger.__file__ if self.reads else "flightedl.examples.ledger"),
            *("--trainers", str(self.trainers), "--pservers", str(self.pservers), "--output", "out", "--job", "ledger"),
            *("--lease-ttl-s", str(self.lease_s), "--checkpoint", self.checkpoint or str(self.directory / "ck")),
            *(["--record", self.record] if self.record else []),
            *more,
            *("--", "--mode", self.mode, "--records", str(self.records), "--epochs", str(self.epochs)),
            *("--pause", str(self.pause_s), "--read-pause", str(self.read_pause_s), "--optimizer", self.optimizer),
            *("--per-task", str(self.per_task), "--batch-size", str(self.batch_size)),
            *(["--swallow-errors"] if self.swallow_after_s else []),
            *(["--tables", "--wide-ids", str(self.wide_ids)] if self.tables else []),
        ]

    def run(self) -> tuple[int, str]:
        """Run the storm to its end. Return exit code and output."""
        return self.run_with(self._rage, *(["--etcd", self.etcd.address] if self.etcd is not None else []))

    def resume(self) -> tuple[int, str]:
        """Resume from checkpoints without faults, on a new etcd or the restored one. Return exit code and output."""
        place = ["--etcd", self.etcd.address] if self.etcd is not None and self.seed % 2 else []
        return self.run_with(lambda *_: None, "--resume", *place, log_name="log-resumed")

    def run_with(
        self, rage: Callable[[ForkedCommand, float], None], *more: str, log_name: str = "log"
    ) -> tuple[int, str]:
        """Run the job with other faults than this storm's.

        Args:
            rage: Called with the launcher's process and the time of its start. Returns when the faults are over.
            more: More arguments of ``flightedl run``.
            log_name: Name of the file for the output.
        """
        environment = {
            **os.environ,
            "FLIGHTEDL_CHECKPOINT_EVERY_S": str(self.checkpoint_every_s),
            "FLIGHTEDL_MARKS": str(self.marks),
            "FLIGHTEDL_LOG_LEVEL": os.environ.get("FLIGHTEDL_LOG_LEVEL", "INFO"),
        }
        self.marks.mkdir(exist_ok=True)
        if self.reads:
            environment[reading_ledger.DIRECTORY] = str(self.directory / "reads")
            (self.directory / "reads").mkdir(exist_ok=True)
        if self.swallow_after_s:
            environment["FLIGHTEDL_GIVE_UP_S"] = str(self.swallow_after_s)
        log = (self.directory / log_name).open("wb")
        start = time.monotonic()
        with ForkedCommand(
            self.forks, self.arguments(*more), cwd=self.directory, stdout=log, env=environment
        ) as process:
            try:
                rage(process, start)
                code = process.wait(max(1.0, self.limit_s - (time.monotonic() - start)))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait(15)
                code = -1
            finally:
                if process.poll() is None:
                    process.kill()
        log.close()
        return code, (self.directory / log_name).read_text()

    def _rage(self, process: ForkedCommand, start: float) -> None:
        chance = random.Random(self.seed)
        counts = {"kill": self.kills, "stop": self.stops, **self.strikes}
        faults = [name for name, count in counts.items() for _ in range(count)]
        chance.shuffle(faults)
        self.wait_for(process, start, "epoch 1/")
        time.sleep(2.0)
        victims = Victims(process.pid, chance, self.lease_s, events=self.events)
        backup = None
        for number, fault in enumerate(faults):
            time.sleep(chance.expovariate(1 / self.every_s))
            if process.poll() is not None or time.monotonic() - start > self.limit_s:
                return
            if self.etcd is not None and number == len(faults) // 2:
                backup = self.etcd.backup()
                victims.note("copied etcd's data")
            if (done := STRIKES[fault](victims, self.roles)) is not None:
                self.done[done] += 1
        if self.etcd is not None and backup is not None:
            self.etcd.restore(backup)
            victims.note("restored etcd from the copy")
            self.done["old etcd"] += 1

    def wait_for(self, process: ForkedCommand, start: float, text: str) -> None:
        """Wait until the launcher has printed a text, or has ended. Raises TimeoutError after 90 s."""
        while text not in (self.directory / "log").read_text() and process.poll() is None:
            if time.monotonic() - start > 90:
                raise TimeoutError((self.directory / "log").read_text())
            time.sleep(0.2)

    def read_findings(self) -> list[str]:
        """Return all errors in what the job's blocks counted and its processes read."""
        if not self.reads:
            return []
        if not list(Path(self.record).glob(f"*{SUFFIX}")):
            return ["nothing was recorded"]
        counted = account(recordings_in(Path(self.record))).findings
        return [*counted.values(), *findings(Path(self.record), self.directory / "reads")]

    def stored_findings(self) -> list[str]:
        """Return all errors in the checkpoint that the job left."""
        mode = MODES[self.mode]
        is_shuffled = mode.is_shuffled(self.optimizer)
        batches = self.epochs * len(batch_sizes(self.records, self.per_task, self.batch_size, is_shuffled=is_shuffled))
        found = stored_findings(
            self.checkpoint or str(self.directory / "ck"),
            self.directory / "out" / "ledger.npz",
            batches if mode.counts_updates else None,
            counts_updates=self.optimizer == "adam" or mode.shows_shares(self.optimizer),
        )
        return list(found)


def verdict(output: str) -> tuple[int, int] | None:
    """Return the ledger's counts (lost, double)."""
    found = re.findall(r"ledger: \d+ records x \d+ epochs: (\d+) lost, (\d+) double", output)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


#: Arguments for tasks of hundreds of batches, read as slowly as they are trained.
_LONG_TASKS = (
    "--kills 0 --stops 0 --lease 4 --records 6000 --per-task 1500 --batch-size 5 --read-pause 0.02 --pause 0.005"
)
#: Arguments for tasks whose halves, after five failures, still consist of complete sums of four batches.
_EVEN_HALVES = "--records 6400 --per-task 1600"
#: Arguments for a storm in which every kind of process is killed and frozen.
_MIXED = "--kills 8 --stops 2 --strike trainer+master=1 --strike trainer+pserver=1 --records 12000 --per-task 2000"
#: Arguments for tables with enough rows per message for two threads of a pserver.
_TABLES = "--tables --wide-ids 40000"
#: Storms for one night: each situation known to be hard, with all modes and optimizers.
SERIES = (
    f"--mode sync --epochs 2 --every 1 {_MIXED}",
    f"--mode async --epochs 2 --every 1 {_MIXED}",
    f"--mode async --optimizer adam --strike trainer+master=5 --strike same-name=4 --strike two=3 {_LONG_TASKS}",
    f"--mode sync --strike trainer+master=5 --strike same-name=4 --strike trainer+etcd=3 {_LONG_TASKS}",
    f"--mode mean --optimizer adam --tables --strike two=8 --strike trainer+pserver=4 --s3 {_LONG_TASKS}",
    f"--mode mean --strike two=8 --strike trainer+pserver=4 {_LONG_TASKS} --batch-size 7",
    f"--mode async {_TABLES} --checkpoint-every 1 --epochs 2 --every 1 {_MIXED}",
    f"--mode sync {_TABLES} --checkpoint-every 1 --epochs 2 --every 1 {_MIXED}",
    f"--mode backup --epochs 2 --every 1 {_MIXED}",
    f"--mode async --strike stall=4 --strike trainer+master=2 --swallow-after 5 {_LONG_TASKS} --lease 12 --epochs 4",
    f"--mode sync --strike stall=4 --strike trainer+master=2 --swallow-after 5 {_LONG_TASKS} --lease 12 --epochs 4",
    f"--mode bounded --optimizer adam --strike starve=3 --strike trainer+pserver=3 --strike two=3 {_LONG_TASKS}",
    f"--mode accumulated-mean --tables --strike trainer+master=3 --strike two=5 {_LONG_TASKS} {_EVEN_HALVES}",
    f"--mode async --tables --strike trainer+pserver=2 --strike two=2 --old-etcd {_LONG_TASKS}",
    f"--mode sync --strike trainer+master=2 --strike two=2 --old-etcd {_LONG_TASKS}",
)


def main() -> int:
    """Run one storm or the series."""
    parser = parser_of_a_storm()
    chosen = parser.parse_args()
    if not chosen.series:
        return run_one(chosen)
    worst = 0
    for number, line in enumerate(SERIES, 1):
        arguments = [*line.split(), "--directory", str(chosen.directory / str(number)), "--seed", str(chosen.seed)]
        print(f"storm {number} of {len(SERIES)}: {line}", flush=True)
        worst = max(worst, abs(run_one(parser.parse_args(arguments))))
    counts = sum(map(left_in, chosen.directory.glob("*/marks")), Counter[str]())
    print(f"processes that reached each mark:\n{report(counts)}", flush=True)
    return worst


def parser_of_a_storm() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser()
    for name, default in (("kills", 60), ("stops", 20), ("records", 20_000), ("epochs", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("trainers", 3), ("pservers", 2), ("per-task", 200), ("batch-size", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default_s in (("every", 1.5), ("pause", 0.02), ("read-pause", 0.0), ("lease", 2.0), ("limit", 1200.0)):
        parser.add_argument(f"--{name}", type=float, default=default_s)
    parser.add_argument("--checkpoint-every", type=float, default=2.0)
    parser.add_argument("--swallow-after", type=float, default=0.0, help="the script goes on after errors of a step")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--roles", default="trainer,pserver,master,etcd")
    parser.add_argument("--strike", action="append", default=[], help=f"name=count; {', '.join(STRIKES)}")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--tables", action="store_true", help="count in rows of embedding tables, too")
    parser.add_argument("--wide-ids", type=int, default=0, help="with --tables: ids that each batch counts in, too")
    parser.add_argument("--old-etcd", action="store_true", help="restore etcd from an older backup; then resume")
    parser.add_argument("--s3", action="store_true", help="keep checkpoints on a real S3 server, started for the storm")
    parser.add_argument("--series", action="store_true", help="all that are known to be hard, one after another")
    return parser


def run_one(chosen: argparse.Namespace) -> int:
    """Run one storm with the servers that it needs, and return its exit code."""
    with contextlib.ExitStack() as stack:
        if chosen.s3:
            server = stack.enter_context(S3Server())
            os.environ.update(server.environment)
            server.make_bucket("storm")
            chosen.checkpoint = "s3://storm/ck"
        storm = storm_of(chosen)
        if chosen.old_etcd:
            storm.etcd = stack.enter_context(EtcdServer())
        return one(storm)


def storm_of(chosen: argparse.Namespace) -> Storm:
    """Return the storm described by the command line."""
    return Storm(
        chosen.directory.absolute(),
        chosen.mode,
        chosen.kills,
        chosen.stops,
        tuple(chosen.roles.split(",")),
        strikes={name: int(count) for name, _, count in (strike.partition("=") for strike in chosen.strike)},
        trainers=chosen.trainers,
        pservers=chosen.pservers,
        records=chosen.records,
        per_task=chosen.per_task,
        batch_size=chosen.batch_size,
        epochs=chosen.epochs,
        pause_s=chosen.pause,
        read_pause_s=chosen.read_pause,
        optimizer=chosen.optimizer,
        swallow_after_s=chosen.swallow_after,
        tables=chosen.tables,
        wide_ids=chosen.wide_ids,
        every_s=chosen.every,
        lease_s=chosen.lease,
        checkpoint=chosen.checkpoint,
        checkpoint_every_s=chosen.checkpoint_every,
        seed=chosen.seed,
        limit_s=chosen.limit,
    )


def one(storm: Storm) -> int:
    """Run the storm and print its result. Return 0 if it ended exact."""
    storm.directory.mkdir(parents=True, exist_ok=True)
    storm.reads, storm.record = storm.etcd is None, str(storm.directory / "recorded")
    start = time.monotonic()
    code, output = storm.run()
    if storm.etcd is not None and storm.done["old etcd"]:
        print(f"etcd went back: exit code {code}; {output.splitlines()[-3:]}")
        # A job that had already ended has nothing to reject.
        is_right = code not in {0, -1} or (code == 0 and verdict(output) == (0, 0))
        code, output = storm.resume()
        code = code if is_right else 1
    (storm.directory / "events").write_text("\n".join(storm.events))
    wrong = [*(storm.stored_findings() if verdict(output) is not None else []), *storm.read_findings()]
    result = {
        "mode": storm.mode,
        "optimizer": storm.optimizer,
        "seed": storm.seed,
        "exit": code,
        "verdict": verdict(output),
        "wrong": wrong,
        "faults": dict(storm.done),
        "marks": len(left_in(storm.marks)),
        "swallowed": output.count("ledger: goes on after"),
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(result), flush=True)
    if code or verdict(output) != (0, 0) or wrong:
        print(*storm.events, sep="\n")
        print(*(line for line in output.splitlines() if "ledger: " in line), sep="\n")
        print(output[-3000:])
        return code or 1
    shutil.rmtree(storm.record, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
