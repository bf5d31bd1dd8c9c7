"""``flightedl prove``: runs a script under seeded kills and freezes, and checks that every batch counts exactly once.

* Up to three runs without faults show how long the script takes, and how much its final loss varies by itself.
* Runs with faults follow until the time is over. Each run has its own seed, which determines the strikes. After each
  run, the account of the batches is computed from the recordings of all processes (``recording.account``).

The verdict depends only on this account, and on whether all runs end as the runs without faults do. A final loss
outside their band is only a warning, because a training script may be random. The first run that fails ends the proof.
Its recordings and logs are kept, while those of successful runs are deleted.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flightedl.adapters.clock import SystemClock
from flightedl.curves.files import read_points
from flightedl.errors import EXIT_FAILED, NotFoundError, UsageError
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.forking import ForkServer
from flightedl.launch.policy import Limits, Role
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.proof import BAND_RUNS, Proof, Run, counted, proof_of, typical_seconds
from flightedl.launch.run import StatusPoller, job_name, new_output_directory
from flightedl.launch.strikes import Striker, strikes
from flightedl.launch.supervisor import Outcome, explain
from flightedl.launch.trainer import check_target
from flightedl.launch.verdict import verdict
from flightedl.recording.account import Account, account
from flightedl.recording.reader import recordings_in

#: Name of the file in a run's directory that lists the run's strikes and restarts.
EVENTS = "events.txt"
#: Maximum share of the time for runs without faults.
_UNDISTURBED_SHARE = 0.4
_LEASE_S = 2.0
_CHECKPOINT_EVERY_S = 2.0
#: Mean number of strikes in the duration of a run without faults, and bounds on the mean time between two strikes.
_STRIKES = 10
_STRIKE_EVERY_S = (0.3, 1.5)
#: Seconds between two lines of progress.
_PROGRESS_S = 10.0
_POLL_S = 0.05
#: Seconds after the end of a run within which all processes must write the rest of their recordings.
_SETTLE_S = 0.5
#: A run hangs if, not counting its strikes, it takes longer than this many runs without faults plus this many seconds.
_PATIENCE = 4.0
_PATIENCE_S = 60.0
#: Fraction of a run's values, counted from the end, that are averaged to get the final value.
_LAST_SHARE = 0.1
_LIMITS = Limits(ended_short_runs=100_000, server_short_runs=100, restarts_limit=100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofOptions:
    """Options of ``flightedl prove``."""

    target: str
    arguments: tuple[str, ...]
    trainers: int
    pservers: int
    roles: tuple[Role, ...]
    budget_s: float
    seed: int
    #: Directory for logs and recordings; None to create one under ``runs/``.
    output: Path | None
    #: Name of the logged metric to compare; empty for "loss", or for the only metric.
    metric: str = ""


def prove(options: ProofOptions, say: Callable[[str], None], forks: ForkServer) -> Proof:
    """Run the script without faults and with faults. Return the verdict.

    Raises:
        UsageError: The script does not end by itself in time, or fails without being disturbed.
    """
    check_target(options.target)
    prover = _Prover(options, say, forks)
    undisturbed = prover.undisturbed()
    disturbed = prover.disturbed(typical_seconds(undisturbed)) if undisturbed[-1].is_exact else []
    return proof_of(str(prover.directory), prover.metric, undisturbed, disturbed)


class _Prover:
    def __init__(self, options: ProofOptions, say: Callable[[str], None], forks: ForkServer) -> None:
        self._options = options
        self._say = say
        self._forks = forks
        self._clock = SystemClock()
        self._started_at = self._clock.now()
        self._number = 0
        self._strike_every_s = _STRIKE_EVERY_S[1]
        #: Directory of the runs' directories.
        self.directory = options.output or new_output_directory(f"prove-{job_name(options.target)}", Path("runs"))
        self.metric = options.metric

    def _left_s(self) -> float:
        return self._options.budget_s - (self._clock.now() - self._started_at)

    def undisturbed(self) -> list[Run]:
        """Run the script without faults, to learn its duration and its final value.

        Raises:
            UsageError: The script fails, takes too long, or has no model.
        """
        runs: list[Run] = []
        share_s = self._options.budget_s * _UNDISTURBED_SHARE
        while not runs or (
            len(runs) < BAND_RUNS and runs[-1].is_exact and (len(runs) + 1) * runs[-1].seconds < share_s
        ):
            run = self._run(None, 0.0, share_s)
            if run.exit_code and not run.is_miscounted:
                raise UsageError(
                    f"the script has to end by itself within {share_s:.0f} s if nothing is killed (give it less data, "
                    f"or raise --budget): {run.reason}"
                )
            if run.account is None or not run.account.blocks:
                raise UsageError("the script declared no model, so no pserver counts its batches: call job.parameters")
            runs.append(run)
            final = "" if run.final is None else f", final {self.metric} {run.final:.4g}"
            self._say(f"undisturbed run: {run.seconds:.1f} s, {run.account.expected} batches{final}")
        return runs

    def disturbed(self, typical_s: float) -> list[Run]:
        """Run the script with faults until a run fails or the time is up.

        Args:
            typical_s: Duration of an undisturbed run.
        """
        runs: list[Run] = []
        least_s, most_s = _STRIKE_EVERY_S
        self._strike_every_s = min(max(typical_s / _STRIKES, least_s), most_s)
        while not runs or (runs[-1].is_exact and self._left_s() > max(run.seconds for run in runs)):
            seed = self._options.seed + len(runs)
            strike_s = max(self._left_s() - 2 * typical_s, typical_s)
            run = self._run(seed, strike_s, strike_s + _PATIENCE * typical_s + _PATIENCE_S)
            runs.append(run)
            found = run.account
            ends = "" if found is None else f"; {found.expected} batches: {found.lost} lost, {found.double} double"
            goodput = f"{run.seconds:.1f} s, goodput {typical_s / run.seconds:.0%}"
            self._say(f"run with seed {seed}: {counted(run.strikes)}; {goodput}{ends}")
        return runs

    def _run(self, seed: int | None, strike_s: float, limit_s: float) -> Run:
        """Run the script once. ``seed`` is None for a run without faults."""
        self._number += 1
        directory = self.directory.absolute() / f"run-{self._number}"
        if directory.exists():
            raise UsageError(f"{directory} already exists: choose another place (--output)")
        recording, checkpoints = directory / "recording", directory / "checkpoints"
        events: list[str] = []
        started_at = self._clock.now()

        def note(sentence: str) -> None:
            events.append(f"{self._clock.now() - started_at:8.2f} s  {sentence}")

        with contextlib.ExitStack() as stack:
            cluster = LocalCluster(
                self._options.pservers,
                job=job_name(self._options.target),
                checkpoint=checkpoints.as_uri(),
                output_dir=directory,
                trainers=TrainerProgram(self._options.target, self._options.arguments, self._options.trainers),
                standby=True,
                record=recording,
                limits=_LIMITS,
                on_event=note,
                forks=self._forks,
                lease_ttl_s=_LEASE_S,
                checkpoint_every_s=_CHECKPOINT_EVERY_S,
            )
            stack.callback(cluster.stop)
            cluster.start(ready_s=None)
            poller = StatusPoller(cluster, self._clock)
            stack.callback(poller.close)
            stack.callback(cluster.stop)
            plan = strikes(seed or 0, self._options.roles, every_s=self._strike_every_s, lease_s=_LEASE_S)
            striker = Striker(cluster, plan)
            outcome = self._watch(cluster, poller, striker, strike_s, limit_s, note)
            seconds = self._clock.now() - started_at
            if outcome.exit_code == 0:
                poller.wait_for_last_status()
                outcome = verdict(poller.status, keeps_checkpoints=True)
                self._clock.sleep(_SETTLE_S)
        (directory / EVENTS).write_text("".join(f"{event}\n" for event in events), "utf-8")
        run = Run(
            seed=seed,
            seconds=seconds,
            exit_code=outcome.exit_code,
            reason=explain(outcome),
            strikes=dict(sorted(striker.done.items())),
            account=self._account_of(recording),
            final=self._final_value(directory),
        )
        if run.is_exact:
            for path in (recording, checkpoints):
                shutil.rmtree(path, ignore_errors=True)
        return run

    def _watch(
        self,
        cluster: LocalCluster,
        poller: StatusPoller,
        striker: Striker,
        strike_s: float,
        limit_s: float,
        note: Callable[[str], None],
    ) -> Outcome:
        """Strike for ``strike_s`` seconds after training has begun. Return when the job ends, or after ``limit_s``."""
        started_at = said_at = self._clock.now()
        while (outcome := cluster.outcome(_POLL_S)) is None:
            now, status = self._clock.now(), poller.status
            if now - said_at > _PROGRESS_S and status is not None:
                said_at = now
                at = f"epoch {status.epoch + 1}, {status.tasks.done} of {status.tasks.total} tasks"
                self._say(f"  {now - started_at:.0f} s: {striker.done.total()} strikes, {at}")
            if now - started_at > limit_s:
                waits = "" if status is None else f" (it is {status.state}: {status.waiting_for or 'not waiting'})"
                outcome = Outcome(EXIT_FAILED, f"the run did not end within {limit_s:.0f} s{waits}")
                break
            if status is not None and status.state == "failed":
                outcome = Outcome(EXIT_FAILED, status.error or "the job failed")
                break
            if now - started_at > strike_s:
                striker.end()
            elif striker.is_started or (status is not None and status.state == "training"):
                for sentence in striker.strike(now):
                    note(sentence)
        striker.end()
        return outcome

    @staticmethod
    def _account_of(recording: Path) -> Account | None:
        try:
            return account(recordings_in(recording))
        except NotFoundError:
            return None

    def _final_value(self, directory: Path) -> float | None:
        try:
            points = read_points(directory)
        except NotFoundError:
            return None
        names = {point.name for point in points}
        if not self.metric:
            self.metric = "loss" if "loss" in names else min(names)
        values = [(point.value, point.weight) for point in points if point.name == self.metric]
        last = values[-max(1, round(len(values) * _LAST_SHARE)) :]
        weight = sum(weight for _, weight in last)
        return sum(value * weight for value, weight in last) / weight if weight else None
