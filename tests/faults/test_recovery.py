"""Complete jobs that lose servers, stores or state: every record still counts exactly once.

``storm.SERIES`` has storms in all modes. The modes here are those in which processes wait for each other most.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import flightedl as fe
from flightedl.launch.forking import ForkServer
from flightedl.launch.programs import TrainerProgram
from flightedl.messages.decoding import builtins_from_json
from flightedl.recording.reader import Recording, recordings_in
from flightedl.recording.replay import replay

from ..launch.forked_launcher import ForkedCommand
from .storm import Storm, verdict

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(700)]


@pytest.fixture
def run(tmp_path: Path, forks: ForkServer) -> Iterator[Callable[..., ForkedCommand]]:
    """Function that starts a ledger job and, by default, waits for its end."""
    with contextlib.ExitStack() as stack:

        def start(*options: str, arguments: tuple[str, ...] = (), wait: bool = True) -> ForkedCommand:
            command = ["run", "flightedl.examples.ledger", "--output", "out"]
            own = ["--lease-ttl-s", "2", "--checkpoint", str(tmp_path / "ck"), "--checkpoint-every-s", "1", *options]
            script = ["--records", "4000", "--per-task", "100", *arguments]
            with (tmp_path / "log").open("ab") as log:
                process = ForkedCommand(
                    forks, [*command, *own, "--", *script], cwd=tmp_path, stdout=log, env=dict(os.environ)
                )
            stack.enter_context(process)
            stack.callback(process.kill)
            if wait:
                process.wait(180)
            return process

        yield start


def text(directory: Path) -> str:
    return (directory / "log").read_text()


def until(condition: Callable[[], object], process: ForkedCommand, directory: Path) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, text(directory)
        assert time.monotonic() < deadline, text(directory)
        time.sleep(0.1)


def test_killed_pservers_lose_nothing(tmp_path: Path, forks: ForkServer) -> None:
    storm = Storm(tmp_path, "async", kills=4, roles=("pserver",), records=7_000, epochs=2, every_s=2.0, limit_s=240)
    require_exact(storm, forks)
    assert storm.done["kill pserver"] >= 2


@pytest.mark.parametrize("mode", ["bounded", pytest.param("mean-backup", marks=pytest.mark.storm)])
def test_every_record_counts_once_through_a_mixed_storm(tmp_path: Path, mode: str, forks: ForkServer) -> None:
    storm = Storm(tmp_path, mode, kills=8, stops=2, records=12_000, epochs=2, every_s=1.0, seed=1, limit_s=600)
    storm.per_task, storm.strikes = 2000, {"trainer+master": 1, "trainer+pserver": 1}
    # The last batch of an epoch has fewer records, or of each task if records are not shuffled.
    storm.optimizer, storm.batch_size = "adam" if mode == "bounded" else "sgd", 35
    storm.record, storm.reads = str(tmp_path / "recorded"), True
    require_exact(storm, forks)
    assert sum(storm.done.values()) >= 5
    assert storm.read_findings() == []
    require_the_same_again(tmp_path / "recorded")


def require_exact(storm: Storm, forks: ForkServer) -> None:
    """Check that the job has ended, has counted each record once, and has left a checkpoint of that state."""
    storm.forks = forks
    code, output = storm.run()
    assert (code, verdict(output)) == (0, (0, 0)), output
    assert storm.stored_findings() == []


def require_the_same_again(directory: Path) -> None:
    """Require that recordings, also of killed processes, replay without differences and contain the first batch."""
    recordings = recordings_in(directory)
    found = [replay(recording) for recording in recordings]
    assert [each.difference for each in found if each.difference is not None] == []
    assert {each.header.process for each in recordings} == {"master", "pserver", "trainer"}
    replies = [each["Answer"]["reply"].get("TasksReply", {}) for each in effects_of(recordings, "master", "Answer")]
    given = [each for reply in replies for each in reply.get("assignments", ())]
    assert any((each["epoch"], each["task"], each["first_batch"]) == (0, 0, 0) for each in given)
    updates = [each["Update"]["batches"] for each in effects_of(recordings, "blocks", "Update")]
    assert any(batch == [0, 0, 0] for batches in updates for batch, _ in batches)


def effects_of(recordings: Iterable[Recording], core: str, kind: str) -> Iterator[Any]:
    """Yield the effects of one kind in the records of one kind of core."""
    for _, record in (each for recording in recordings for each in recording.records()):
        if record.core.startswith(core):
            yield from (each for each in builtins_from_json(record.effects) if kind in each)


def test_a_stopped_job_resumes_from_its_checkpoint_alone(run: Callable[..., ForkedCommand], tmp_path: Path) -> None:
    more = ("--trainers", "2", "--pservers", "3")
    epochs = ("--epochs", "2")
    first = run("--trainers", "2", "--pservers", "2", arguments=(*epochs, "--pause", "0.05"), wait=False)
    until(lambda: len(list((tmp_path / "ck" / "ledger").glob("c-*/manifest.json"))) >= 3, first, tmp_path)
    first.send_signal(signal.SIGINT)
    first.wait(30)
    again = run(*more, arguments=epochs)
    assert again.returncode == 2, text(tmp_path)
    assert "Add --resume" in text(tmp_path)
    resumed = run("--resume", *more, arguments=epochs)
    assert resumed.returncode == 0, text(tmp_path)
    assert verdict(text(tmp_path)) == (0, 0), text(tmp_path)


def test_rows_survive_killed_servers_and_another_number_of_pservers(
    run: Callable[..., ForkedCommand], tmp_path: Path
) -> None:
    """The rows come from a base and increments written under two masters, one of which may have completed none."""
    epochs = ("--epochs", "2", "--tables", "--mode", "async")
    first = run("--trainers", "2", "--pservers", "2", arguments=(*epochs, "--pause", "0.1"), wait=False)
    place = tmp_path / "ck" / "ledger"

    def increments() -> list[Path]:
        """Return the increments of all checkpoints that are not deleted during the call."""
        found: list[Path] = []
        for checkpoint in place.glob("c-*"):
            with contextlib.suppress(FileNotFoundError):
                found += checkpoint.glob("shard-*-on-*.arrow")
        return found

    def chains() -> dict[str, set[str]]:
        """Return the base file of each chain, with the checkpoints that have increments on it."""
        found: dict[str, set[str]] = {}
        for each in increments():
            if (each.parent / "manifest.json").exists():
                found.setdefault(each.stem.rpartition("-")[2], set()).add(each.parent.name)
        return found

    def kill(role: str) -> None:
        for child in psutil.Process(first.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if f"flightedl.{role}" in child.cmdline():
                    child.kill()

    until(chains, first, tmp_path)
    kill("master")
    begun = chains()
    until(lambda: any(chains().get(since, set()) - numbers for since, numbers in begun.items()), first, tmp_path)
    before = {each.name for each in place.glob("c-*")}
    kill("pserver")
    until(lambda: {each.parent.name for each in increments()} - before, first, tmp_path)
    first.send_signal(signal.SIGINT)
    first.wait(30)
    assert first.returncode == 130, text(tmp_path)
    resumed = run("--resume", "--trainers", "2", "--pservers", "3", arguments=epochs)
    assert resumed.returncode == 0, text(tmp_path)
    assert verdict(text(tmp_path)) == (0, 0), text(tmp_path)


def test_resuming_without_a_checkpoint_is_rejected(run: Callable[..., ForkedCommand], tmp_path: Path) -> None:
    assert run("--resume").returncode == 2
    assert "no checkpoint from which job ledger can resume" in text(tmp_path)


def test_a_broken_store_does_not_stop_the_job(run: Callable[..., ForkedCommand], tmp_path: Path) -> None:
    """All records are trained and counted. Output and exit code report the missing last checkpoint."""
    process = run("--trainers", "2", "--pservers", "2", arguments=("--pause", "0.02"), wait=False)
    place = tmp_path / "ck" / "ledger"
    until(lambda: list(place.glob("c-*/manifest.json")), process, tmp_path)
    place.rename(tmp_path / "gone")
    place.write_text("a file where a directory should be")
    assert process.wait(180) == 4, text(tmp_path)
    assert verdict(text(tmp_path)) == (0, 0)
    assert "its last checkpoint was not written" in text(tmp_path)


def test_pservers_that_get_sigterm_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    """After SIGTERM to one pserver, the checkpoint that it requests from the master is complete before it ends."""
    with fe.local(
        pservers=1,
        checkpoint=str(tmp_path / "ck"),
        output_dir=tmp_path / "out",
        checkpoint_every_s=1000.0,
        drain_s=40.0,
        trainers=TrainerProgram(
            "flightedl.examples.ledger",
            ("--data", str(tmp_path / "data"), "--epochs", "6", "--pause", "0.05"),
            2,
        ),
    ) as cluster:
        manifests = (tmp_path / "ck" / "local").glob
        deadline = time.monotonic() + 60
        while not list(manifests("c-1/manifest.json")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        cluster.kill("pserver", 0, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not list(manifests("c-2/manifest.json")):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.s3
@pytest.mark.storm
def test_every_record_counts_once_through_a_storm_with_checkpoints_on_s3(
    tmp_path: Path, s3_url: str, forks: ForkServer
) -> None:
    storm = Storm(tmp_path, "async", kills=8, stops=2, records=12_000, epochs=2, every_s=1.0, seed=3, limit_s=600)
    storm.optimizer = "adam"
    storm.checkpoint, storm.roles = f"{s3_url}/ck", ("trainer", "pserver", "master", "etcd")
    require_exact(storm, forks)
    assert sum(storm.done.values()) >= 5


@pytest.mark.s3
def test_killed_pservers_are_restored_from_s3(tmp_path: Path, s3_url: str, forks: ForkServer) -> None:
    storm = Storm(tmp_path, "sync", kills=2, roles=("pserver",), records=4_000, epochs=2, every_s=1.0, limit_s=240)
    storm.checkpoint = f"{s3_url}/ck"
    require_exact(storm, forks)
    assert storm.done["kill pserver"] >= 1
