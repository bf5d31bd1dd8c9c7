"""Complete jobs with real processes: the guarantees of ``flightedl run`` and ``fe.local()``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.errors import JobFailedError, UnavailableError, UsageError
from flightedl.launch.forking import ForkServer
from flightedl.launch.policy import Limits

from .forked_launcher import ForkedCommand

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

Until = Callable[..., None]

ROWS, BATCH, EPOCHS = 4096, 32, 2

SCRIPT = f"""
import sys, time
import numpy as np
import flightedl as fe

with fe.connect() as job:
    data = job.dataset(sys.argv[1], batch_size={BATCH}, epochs={EPOCHS}, shuffle=True, seed=0)
    model = job.parameters({{"w": np.zeros(4, np.float32)}}, optimizer=fe.SGD(lr=0.1), mode=fe.Sync())
    print("training", flush=True)
    for batch in data:
        x = np.stack([batch[f"x{{i}}"].to_numpy() for i in range(4)], axis=1)
        error = x @ model["w"] - batch["y"].to_numpy()
        model.step({{"w": (x.T @ error / len(error)).astype(np.float32)}})
        job.log(loss=float(np.mean(error**2)))
        time.sleep(float(sys.argv[2]))
    if job.once("save"):
        np.save(job.output_dir / "w.npy", model["w"])
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Directory with the script, two data files, and temporary files."""
    random = np.random.default_rng(0)
    for number in range(2):
        x = random.normal(size=(ROWS // 2, 4)).astype(np.float32)
        y = x @ np.array([1, -2, 3, 0.5], np.float32)
        table = pa.table({**{f"x{i}": x[:, i] for i in range(4)}, "y": y})
        pq.write_table(table, tmp_path / f"data-{number}.parquet", row_group_size=256)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "temporary").mkdir()
    return tmp_path


class Run:
    """One ``flightedl run`` in another process."""

    def __init__(self, workplace: Path, forks: ForkServer | None, pause_s: float, trainers: int, *more: str) -> None:
        self.workplace = workplace
        self.log = (workplace / "log").open("wb")
        command = ["run", "train.py", "--trainers", str(trainers), "--pservers", "2", "--output", "out", *more]
        self.process = ForkedCommand(
            forks,
            [*command, "--lease-ttl-s", "2", "--", "data-*.parquet", str(pause_s)],
            cwd=workplace,
            stdout=self.log,
            env={**os.environ, "TMPDIR": str(workplace / "temporary")},
        )
        self.tree: dict[int, psutil.Process] = {}

    def output(self) -> str:
        return (self.workplace / "log").read_text()

    def remember_tree(self) -> None:
        """Record all processes of the job, to check after its end that they have ended."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.tree[child.pid] = child

    def pids(self, module: str) -> list[int]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in found if module in " ".join(child.cmdline())]

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def end(self, timeout_s: float) -> int:
        """Wait for the end, and return the exit code. A job that does not end fails the test with its output."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job did not end in {timeout_s:g} s:\n{self.output()}")

    def check_nothing_is_left(self) -> None:
        left = [child for child in self.tree.values() if child.is_running() and child.status() != "zombie"]
        assert left == []
        assert list((self.workplace / "temporary").iterdir()) == []

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def run(workplace: Path, forks: ForkServer) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def start(pause_s: float = 0.0, trainers: int = 2, *more: str, forked: bool = True) -> Run:
        """Start the command: forked if ``forked``, otherwise as a program as users start it."""
        made.append(Run(workplace, forks if forked else None, pause_s, trainers, *more))
        return made[-1]

    yield start
    for each in made:
        each.close()


def check_all_was_done(run: Run) -> None:
    assert run.end(90.0) == 0, run.output()
    assert f"{ROWS * EPOCHS:,} records" in run.output()
    assert re.search(r"(\d+) of \1 tasks of the last epoch done, 0 tasks failed", run.output())
    assert np.load(run.workplace / "out" / "w.npy") == pytest.approx([1, -2, 3, 0.5], abs=0.01)
    run.check_nothing_is_left()


def test_a_script_runs_to_its_end(run: Callable[..., Run], until: Until) -> None:
    job = run(forked=False)
    until(lambda: "| training" in job.output(), 90.0)
    job.remember_tree()
    check_all_was_done(job)
    assert sorted(path.name for path in (job.workplace / "out" / "logs").iterdir()) == sorted(
        f"{name}.log" for name in ("etcd", "master", "pserver-0", "pserver-1", "trainer-0", "trainer-1")
    )


def test_a_killed_trainer_is_replaced_and_all_tasks_are_done(run: Callable[..., Run], until: Until) -> None:
    job = run(pause_s=0.05)
    until(lambda: job.output().count("| training") == 2, 90.0)
    job.remember_tree()
    os.kill(job.pids("flightedl.launch.trainer")[0], signal.SIGKILL)
    until(lambda: job.output().count("| training") == 3 or job.is_over(), 90.0)
    assert not job.is_over(), (job.process.returncode, job.output())
    job.remember_tree()
    assert "killed by SIGKILL; a new one is started" in job.output()
    check_all_was_done(job)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all_processes(run: Callable[..., Run], until: Until, number: signal.Signals, code: int) -> None:
    job = run(pause_s=0.05, forked=number is not signal.SIGINT)
    until(lambda: "| training" in job.output(), 90.0)
    job.remember_tree()
    job.process.send_signal(number)
    # The grace times account for five seconds; the rest depends on the machine.
    assert job.end(20.0) == code
    job.check_nothing_is_left()


def test_a_job_stops_when_the_reader_of_its_output_has_ended(workplace: Path) -> None:
    temporary = workplace / "temporary"
    command = ["run", "train.py", "--trainers", "2", "--output", "out", "--lease-ttl-s", "2"]
    with (
        (workplace / "errors").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "flightedl", *command, "--", "data-*.parquet", "0.05"],
            cwd=workplace,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert any("| training" in line for line in process.stdout)
            tree = psutil.Process(process.pid).children(recursive=True)
            # ``flightedl run ... | head`` has this effect.
            process.stdout.close()
            assert process.wait(40.0) == 128 + signal.SIGPIPE
        finally:
            process.kill()
    said = (workplace / "errors").read_text()
    assert "ended in" in said
    assert "stopped: its output is no longer read" in said
    assert [child for child in tree if child.is_running() and child.status() != "zombie"] == []
    assert list(temporary.iterdir()) == []


def test_a_job_stopped_by_a_signal_leaves_a_checkpoint_of_all_finished_work(
    run: Callable[..., Run], until: Until
) -> None:
    kept = ("--checkpoint", "checkpoints", "--checkpoint-every-s", "0")
    job = run(0.3, 2, *kept)
    # The first checkpoint contains no task, and the next one would be made at the end of the epoch.
    until(lambda: re.search(r"epoch 1/2, tasks [1-9]", job.output()) or job.is_over(), 90.0)
    job.process.send_signal(signal.SIGTERM)
    assert job.end(60.0) == 143
    said = re.search(r"checkpoint c-\d+ at \S+ has (\d+) of \d+ tasks of epoch \d; continue from it", job.output())
    assert said, job.output()
    assert int(said[1]) > 0
    check_all_was_done(run(0.0, 2, *kept, "--resume"))


def test_a_killed_launcher_leaves_no_processes(run: Callable[..., Run], until: Until) -> None:
    job = run(pause_s=0.05, forked=False)
    until(lambda: "| training" in job.output(), 90.0)
    job.remember_tree()
    job.process.kill()
    until(lambda: not [child for child in job.tree.values() if child.is_running() and child.status() != "zombie"], 30.0)
    until(lambda: not list((job.workplace / "temporary").iterdir()), 30.0)


def test_a_crash_of_the_script_ends_the_job(run: Callable[..., Run], workplace: Path) -> None:
    script = workplace / "train.py"
    script.write_text(script.read_text().replace("error = x", "error = 1 / 0 * x"))
    job = run(trainers=1)
    assert job.end(60.0) == 1
    lines = job.output().splitlines()
    assert "trainer-0 | ZeroDivisionError: division by zero" in lines
    assert any(line.startswith("flightedl: the script crashed in trainer-0 again") for line in lines)
    assert len([line for line in lines if line == "trainer-0 | training"]) == 2
    job.check_nothing_is_left()


def test_a_wrong_file_name_ends_the_job_at_once(run: Callable[..., Run], workplace: Path) -> None:
    for path in workplace.glob("*.parquet"):
        path.unlink()
    job = run(trainers=1)
    assert job.end(60.0) == 2
    assert "data-*.parquet" in job.output()
    assert job.output().count("| training") == 0


def test_the_status_of_a_running_job_is_shown(until: Until) -> None:
    with fe.local(pservers=2, job="shown") as cluster:
        command = [sys.executable, "-m", "flightedl", "status", "--etcd", cluster.etcd_address, "--job", "shown"]
        shown = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=30, check=True)
        status = json.loads(shown.stdout)
        assert (status["job"], status["state"]) == ("shown", "waiting")
        assert [server["index"] for server in status["pservers"]] == [0, 1]
        assert all(server["generation"] > 0 and server["address"] for server in status["pservers"])
        table = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        assert "waiting for  " in table
        assert "pserver-1" in table
        absent = subprocess.run([*command[:-1], "absent"], capture_output=True, text=True, timeout=30, check=False)
        assert absent.returncode == 2
        assert absent.stderr.startswith("flightedl: job absent is not running at etcd")
        assert len(absent.stderr.splitlines()) == 1


def test_a_cluster_without_trainers_serves_this_process(workplace: Path) -> None:
    with fe.local(pservers=2) as cluster:
        pids = [view.pid for view in cluster.processes]
        directory = cluster.directory
        with cluster.connect() as job:
            data = job.dataset(str(workplace / "data-*.parquet"), batch_size=256, epochs=1)
            model = job.parameters({"w": np.zeros(4, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
            batches = 0
            for _batch in data:
                model.step({"w": np.ones(4, np.float32)})
                batches += 1
            model.pull()
            assert model["w"] == pytest.approx(np.full(4, -float(batches)))
    assert not [pid for pid in pids if pid is not None and psutil.pid_exists(pid)]
    assert not directory.exists()


@pytest.mark.parametrize("role", ["master", "pserver", "etcd"])
def test_a_killed_server_is_replaced(role: str, until: Until) -> None:
    with fe.local(pservers=1, lease_ttl_s=1.0) as cluster:
        before = cluster.kill(role)
        until(lambda: cluster.pid(role) not in {None, before}, 30.0)
        with cluster.status() as status:

            def is_whole() -> bool:
                try:
                    return len(status.read(2.0).pservers) == 1
                except fe.errors.FlightedlError:
                    return False

            until(is_whole, 60.0)
        assert cluster.outcome() is None


def test_a_process_that_the_job_does_not_have_cannot_be_killed() -> None:
    with fe.local(pservers=1) as cluster:
        assert cluster.pid("pserver", 3) is None
        with pytest.raises(UnavailableError, match="pserver 3 is not running at the moment"):
            cluster.kill("pserver", 3)
        with pytest.raises(UsageError, match="the role 'worker' must be one of etcd, master, pserver, trainer"):
            cluster.kill("worker")


def test_a_cluster_that_cannot_start_says_why() -> None:
    limits = Limits(first_delay_s=0.01)
    with (
        pytest.raises(JobFailedError, match=r"cannot listen on 192\.0\.2\.1"),
        fe.local(limits=limits, bind="192.0.2.1", insecure=True),
    ):
        pass


def test_a_second_job_with_the_same_name_is_rejected() -> None:
    with (
        fe.local(job="taken") as cluster,
        pytest.raises(UsageError, match="a job named taken is already running"),
        fe.local(job="taken", etcd=cluster.etcd_address),
    ):
        pass


def test_two_jobs_share_an_etcd() -> None:
    with fe.local(job="one") as first, fe.local(job="two", etcd=first.etcd_address) as second:
        assert second.etcd_address == first.etcd_address


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pservers": -1}, "must be the number of parameter servers, 0 or more"),
        ({"job": "Not Usable"}, "job name"),
        ({"etcd": "nowhere"}, "not host:port"),
        ({"absent_setting": 1}, "no setting named absent_setting"),
    ],
)
def test_wrong_settings_are_rejected_before_anything_starts(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        fe.local(**arguments)
