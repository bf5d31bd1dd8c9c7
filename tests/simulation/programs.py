"""The programs of a simulated job: the product's masters and pservers, and trainers with scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tests.simulation import files, ranks
from tests.simulation.cluster import Cluster, PoisonError, Started
from tests.simulation.scenario import Scenario

JOB = "simulated"
CHECKPOINTS = f"{files.URL}checkpoints"
ETCD = "127.0.0.1:2379"
EVALUATED = "memory://evaluated.parquet"
GROWING = "memory://growing"
RANKED = "memory:///ranked"
#: Number of files of a group's data.
_RANKED_FILES = 3
SAVED_MODEL, SAVED_ROWS, REPORT = (f"{files.URL}saved/{name}" for name in ("model.npz", "rows.parquet", "report.txt"))
_STATUS_S = 1.0
#: Maximum time between two files of growing data.
_GROWTH_S = 2.0
#: Time that a follower waits for a checkpoint, and between two of them.
_FOLLOWING_S, _REST_S = 3.0, 0.3
#: Each is a block of its own.
PARAMETERS = ("a", "b", "c", "d", "e", "f")

Array = npt.NDArray[np.float32]


def _write(url: str, records: npt.NDArray[np.int64]) -> None:
    with fsspec.open(url, "wb") as file:
        pq.write_table(pa.table({"k": records}), file, row_group_size=16)


class Copy(NamedTuple):
    """What a follower has at a checkpoint.

    Args:
        checkpoint: Its number.
        values: Those of all parameters.
        ids: Ids of the rows, (n,).
        rows: Their values, (n, 2).
    """

    checkpoint: int
    values: Array
    ids: npt.NDArray[np.int64]
    rows: Array


class Programs:
    """What each role of a simulated job runs.

    Args:
        scenario: The job.
        record: Directory of the recordings; empty to record nothing.
    """

    def __init__(self, scenario: Scenario, record: str) -> None:
        self.scenario = scenario
        self.record = record
        #: Set before the first process starts.
        self.cluster: Cluster | None = None
        #: Values that each trainer read after its last batch.
        self.results: list[Array] = []
        #: Number of records that each trainer knows to be set aside.
        self.lost_records: list[int] = []
        #: Results of their evaluations.
        self.metrics: list[dict[str, float]] = []
        #: What the follower had.
        self.copies: list[Copy] = []

    def by_role(self) -> dict[str, Callable[[Started], object]]:
        """Return the function of each role."""
        return {
            "master": self._master,
            "pserver": self._pserver,
            "standby": self._standby,
            "trainer": self._trainer if self.scenario.group is None else self._rank,
            "admin": self._scale,
            "mode": self._change_mode,
            "watcher": self._watch,
            "follower": self._follow,
        }

    def _measure(self, batch: pa.RecordBatch) -> dict[str, float]:
        return {"k": float(batch["k"].to_numpy().mean())}

    def write_files(self) -> None:
        """Write the data of evaluations, and plan the files that join growing data."""
        records = np.arange(self.scenario.records)
        _write(EVALUATED, records)
        if self.scenario.grows:
            self._grow(records, 0)
        if self.scenario.group is not None:
            for number, part in enumerate(np.array_split(records, _RANKED_FILES)):
                _write(f"{RANKED}/{number}.parquet", part)

    def _grow(self, records: npt.NDArray[np.int64], number: int) -> None:
        """Write the next file of growing data, and plan those that follow."""
        assert self.cluster is not None, "the data of a cluster"
        size = 2 * self.scenario.records_per_task
        if len(records):
            _write(f"{GROWING}/{number:03d}.parquet", records[:size])
            pause_s = _GROWTH_S * self.cluster.chance(f"growth {number}").random()
            self.cluster.scheduler.after(pause_s, lambda: self._grow(records[size:], number + 1))
        else:
            with fsspec.open(f"{GROWING}/_END", "wb"):
                pass

    def _watch(self, _: Started) -> int:
        from flightedl.adapters.clock import SystemClock
        from flightedl.config import CommonSettings
        from flightedl.errors import FlightedlError
        from flightedl.launch.status import JobStatus

        assert self.cluster is not None, "a watcher runs in a cluster"
        status = JobStatus(CommonSettings(job=JOB, etcd=ETCD, same_host="never"), SystemClock())
        while not self.cluster.is_ending:
            with contextlib.suppress(FlightedlError):
                status.read(_STATUS_S)
            self.cluster.scheduler.sleep(_STATUS_S)
        return 0

    def _follow(self, _: Started) -> int:
        import flightedl as fe
        from flightedl.errors import FlightedlError

        assert self.cluster is not None, "a follower runs in a cluster"
        with fe.Follower(ETCD, JOB, same_host="never", name="copy") as follower:
            while not self.cluster.is_ending:
                with contextlib.suppress(FlightedlError), follower.at_checkpoint(_FOLLOWING_S) as number:
                    values = follower.parameters()
                    ids, rows = np.empty(0, np.int64), np.empty((0, 2), np.float32)
                    if "rows" in follower.tables:
                        ids, rows = follower.tables["rows"].rows()
                        assert np.array_equal(follower.tables["rows"].lookup(ids), rows), "rows differ from a lookup"
                    self.copies.append(Copy(number, np.stack([values[name] for name in PARAMETERS]), ids, rows))
                self.cluster.scheduler.sleep(_REST_S)
        return 0

    def pserver_count_key(self) -> str:
        """Return the key in etcd of the number of pservers."""
        from flightedl.coordination.keys import JobKeys

        return JobKeys(JOB).ps_desired

    def group_key(self) -> str:
        """Return the key in etcd of the group of ranks."""
        from flightedl.coordination.keys import JobKeys

        return JobKeys(JOB).group

    def pointer_key(self) -> str:
        """Return the key in etcd of the newest checkpoint."""
        from flightedl.coordination.keys import JobKeys

        return JobKeys(JOB).checkpoint_latest

    def _settings(self, kind: Any, process: Started, **more: Any) -> Any:
        from flightedl.config import settings

        scenario, cluster = self.scenario, self.cluster
        assert cluster is not None, "a server runs in a cluster"
        common = {
            "job": JOB,
            "etcd": ETCD,
            "same_host": "never",
            "lease_ttl_s": scenario.lease_ttl_s,
            "checkpoint": CHECKPOINTS if scenario.has_store else None,
            "record": self.record or None,
            "port": cluster.network.lasting_port(process),
        }
        return settings(kind, {}, **common, **more)

    def _master(self, process: Started) -> int:
        from flightedl.config import MasterSettings, Resume
        from flightedl.master.main import run

        every_s = self.scenario.checkpoint_every_s
        chosen = self._settings(
            MasterSettings,
            process,
            pservers=self.scenario.pservers if self.scenario.group is None else 0,
            checkpoint_every_s=every_s,
            rebalance_s=0.0,
            recovery=self.scenario.recovery,
            stuck_after_s=60.0,
            follow_every_s=0.3,
            resume=Resume.AUTO if self.scenario.may_go_back else Resume.NEVER,
            attempts_limit=self._attempts_limit(),
            # A trainer that is alone, and has nothing else to do, needs this long to convict poison.
            stand_still_s=10.0 if self.scenario.poison or self.scenario.deadly else 600.0,
        )
        return run(chosen)

    def _attempts_limit(self) -> int:
        if self.scenario.poison or self.scenario.deadly:
            return 3
        # The last round of a group is to blame for each kill.
        return 5 if self.scenario.group is None else 1000

    def _pserver(self, process: Started) -> int:
        from flightedl.config import PserverSettings
        from flightedl.pserver.main import run

        return run(self._settings(PserverSettings, process))

    def _standby(self, process: Started) -> int:
        from flightedl.config import PserverSettings
        from flightedl.pserver.main import run

        return run(self._settings(PserverSettings, process, standby=True, standby_lag_s=0.2))

    def _scale(self, process: Started) -> int:
        from flightedl.adapters.clock import SystemClock
        from flightedl.config import CommonSettings
        from flightedl.launch.status import JobStatus
        from flightedl.messages.scaling import ScaleReply, ScaleRequest

        chosen = CommonSettings(job=JOB, etcd=ETCD, same_host="never")
        JobStatus(chosen, SystemClock()).change("scale", ScaleRequest(pservers=process.index), ScaleReply, 10.0)
        return 0

    def _change_mode(self, process: Started) -> int:
        import flightedl as fe
        from flightedl.adapters.clock import SystemClock
        from flightedl.config import CommonSettings
        from flightedl.launch.status import JobStatus
        from flightedl.messages.tasks import ModeReply, ModeRequest

        modes = (
            fe.Sync(reduce="sum"),
            fe.Sync(reduce="sum", backup=1),
            fe.Async(),
            fe.Async(pull_every=2),
            fe.Bounded(staleness=0),
            fe.Bounded(staleness=2),
        )
        status = JobStatus(CommonSettings(job=JOB, etcd=ETCD, same_host="never"), SystemClock())
        status.change("set_mode", ModeRequest(mode=modes[process.index].to_json()), ModeReply, 10.0)
        return 0

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if np.isin(batch["k"].to_numpy(), self.scenario.poison).any():
            raise PoisonError
        return batch

    def _read(self, indices: list[int]) -> pa.RecordBatch:
        return self._checked(pa.record_batch({"k": pa.array(indices, pa.int64())}))

    def _data(self, job: Any) -> Any:
        """Declare the data."""
        scenario = self.scenario
        common = {
            "batch_size": scenario.batch_size // scenario.local_steps,
            "epochs": scenario.epochs,
            "shuffle": True,
            "seed": 1,
            "records_per_task": scenario.records_per_task,
            "on_lost": "continue" if scenario.poison or scenario.deadly else "raise",
        }
        if scenario.grows:
            return job.dataset(f"{GROWING}/*.parquet", follow=True, transform=self._checked, **common)
        return job.indexed(scenario.records, self._read, batched=True, **common)

    def _table(self, job: Any, optimizer: Any) -> Any:
        import flightedl as fe

        evictions = {
            "": None,
            "epochs": fe.Evict(unused_epochs=1),
            "versions": fe.Evict(unused_versions=20),
            "norms": fe.Evict(norm_below=0.1),
        }
        return job.table("rows", 2, optimizer=optimizer, evict=evictions[self.scenario.eviction])

    def _gradient(self, values: npt.NDArray[Any], row: int, records: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        made = np.zeros_like(values)
        made[row, records] = -1.0 - values[row, records] if self.scenario.depends_on_values else -1.0
        return made

    def _trainer(self, process: Started) -> int:
        import flightedl as fe

        scenario, cluster = self.scenario, self.cluster
        assert cluster is not None, "a trainer runs in a cluster"
        chance = cluster.chance(f"script {process.name}")
        modes = {
            "sync": fe.Sync(reduce="sum"),
            "async": fe.Async(push_every=scenario.push_every),
            "bounded": fe.Bounded(staleness=2),
        }
        optimizers = {"sgd": fe.SGD(lr=1.0), "adagrad": fe.Adagrad(lr=0.5)}
        # Each record has an element of its own in each epoch, or one in all of them.
        zeros = np.zeros((1 if scenario.repeats else scenario.epochs, scenario.records), np.float32)
        with fe.connect(
            job=JOB,
            etcd=ETCD,
            same_host="never",
            lease_ttl_s=scenario.lease_ttl_s,
            record=self.record or None,
            process_name=str(process.index),
        ) as job:
            data = self._data(job) if scenario.local_steps == 1 else None
            table = self._table(job, optimizers[scenario.optimizer]) if scenario.has_table else None
            model = job.parameters(
                dict.fromkeys(PARAMETERS, zeros),
                optimizer=optimizers[scenario.optimizer],
                mode=modes[scenario.mode],
                local_steps=scenario.local_steps if scenario.local_steps > 1 else None,
            )
            own = None
            for batch in (data := data or self._data(job)):
                if scenario.saves:
                    job.log(first=float(batch["k"][0].as_py()))
                cluster.scheduler.sleep(scenario.batch_s * chance.random())
                if 0 < scenario.stop_at_s < cluster.scheduler.now:
                    job.stop()
                records = batch["k"].to_numpy()
                if np.isin(records, scenario.deadly).any():
                    cluster.kill(process, 1.0)
                    cluster.scheduler.sleep(0.0)
                row = 0 if scenario.repeats else data.epoch
                ids = row * scenario.records + records
                if table is not None:
                    values = table.pull(ids)
                    table.push(ids, -1.0 - values if scenario.depends_on_values else np.full_like(values, -1.0))
                if scenario.local_steps == 1:
                    model.step({name: self._gradient(model[name], row, records) for name in PARAMETERS})
                    continue
                own = model.local_values(own)
                own = {name: values - self._gradient(values, row, records) for name, values in own.items()}
                model.local_step(own)
            model.pull()
            values = [model[name] for name in PARAMETERS]
            if table is not None:
                rows = table.pull(np.arange(zeros.size))
                values += [rows[:, column].reshape(zeros.shape) for column in (0, 1)]
            self.results.append(np.stack(values))
            self.lost_records.append(data.summary.records)
            if scenario.saves:
                self._save(job, table, str(len(values)))
            if scenario.evaluates:
                self.metrics.append(job.evaluate(EVALUATED, self._measure, batch_size=scenario.batch_size))
        return 0

    def _data_of_group(self, job: Any, plan: ranks.GroupPlan, start: ranks.Start, rank: int) -> Any:
        common = {
            **plan.reading,
            "epochs": self.scenario.epochs,
            "seed": 1,
            "group": "auto" if start.has_torch else (rank, start.size),
            "on_lost": "continue" if self.scenario.deadly else "raise",
        }
        if plan.kind == "indexed":
            return job.indexed(self.scenario.records, self._read, batched=True, **common)
        if plan.kind == "parquet":
            return job.dataset(f"{RANKED}/*.parquet", transform=self._checked, **common)
        urls = [f"{RANKED}/{number}.parquet" for number in range(_RANKED_FILES)]
        return job.mixture(dict(zip(urls, (1.0, 2.0, 1.0), strict=True)), stop="all", **common)

    def _rank(self, process: Started) -> int:
        """Train a model of this program's own on the data of its group."""
        import flightedl as fe

        scenario, cluster, start, rank = self.scenario, self.cluster, process.group_start, process.index
        assert cluster is not None, "a rank runs in a cluster"
        assert cluster.launcher is not None, "a launcher has started it"
        assert start is not None, "it belongs to a start"
        launcher, plan = cluster.launcher, cluster.launcher.plan
        chance = cluster.chance(f"script {process.name}")
        with fe.connect(
            job=JOB,
            etcd=ETCD,
            same_host="never",
            lease_ttl_s=scenario.lease_ttl_s,
            record=self.record or None,
            process_name=str(rank),
            start="" if start.has_torch else f"start-{start.number}",
        ) as job:
            data = self._data_of_group(job, plan, start, rank)
            if start.saved.state is not None and (rank == 0 or not plan.loads_first):
                data.load_state_dict(start.saved.state)
            training = ranks.Training(launcher, start, rank, data, chance)
            for epoch, batch in ranks.batches_of(data, is_ahead=plan.is_ahead):
                cluster.scheduler.sleep(0.0 if start.is_reference else scenario.batch_s * chance.random())
                if 0 < scenario.stop_at_s < cluster.scheduler.now and rank == start.size - 1:
                    job.stop()
                records = tuple(batch["k"].to_pylist())
                if set(records) & set(scenario.deadly):
                    cluster.kill(process, 1.0)
                    cluster.scheduler.sleep(0.0)
                training.step(epoch, records)
            training.end()
            if scenario.evaluates:
                self.metrics.append(job.evaluate(EVALUATED, self._measure, batch_size=scenario.batch_size))
            launcher.succeeded(start, training.model, data.summary)
        return 0

    def _save(self, job: Any, table: Any, report: str) -> None:
        """Save the model and the rows, and write a report. All trainers call this; one of them writes each file."""
        job.save_model(SAVED_MODEL, server=self.scenario.has_store and self.scenario.seed % 2 == 0)
        if table is not None:
            table.export(SAVED_ROWS, slots=True)
            assert len(table) == table.stats().rows, "the number of rows changes after the end"
        if won := job.once("report"):
            won.publish(REPORT, report.encode())
