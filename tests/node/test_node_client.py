"""A client in Node, written from ``schemas/`` alone, reads, follows and trains the model of a running job."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import flightedl as fe
import flightedl_schemas
from flightedl.domain.queue.batching import record_order
from flightedl.domain.queue.drawing import drawn
from flightedl.domain.queue.permutation import key_of
from flightedl_tools.main import run_command_line
from tests.support.contracts.coordinator import eventually

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(120)]

HERE = Path(__file__).parent
VECTOR = np.linspace(-1, 1, 30_000, dtype=np.float32)
MATRIX = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(scope="module", autouse=True)
def node() -> str:
    """Return the path of Node. Fails if the client's packages are missing."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("there is no node on this machine: install Debian's nodejs")
    assert (HERE / "node_modules").exists(), "the packages of the Node client are missing: run `make node-packages`"
    return found


class NodeClient:
    """A process that answers each line of its input with a line of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, line: str = "") -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def program(node: str, command: str, cluster: fe.LocalCluster) -> Sequence[str]:
    return [node, str(HERE / "client.mjs"), command, cluster.etcd_address, cluster.job]


@contextmanager
def started(node: str, command: str, cluster: fe.LocalCluster, *more: str) -> Iterator[NodeClient]:
    arguments = [*program(node, command, cluster), *more]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield NodeClient(process)
        except BaseException:
            process.kill()
            raise


def write_keys(folder: Path, files: int, each: int) -> str:
    for number in range(files):
        keys = range(number * each, (number + 1) * each)
        (folder / f"{number}.jsonl").write_text("".join(f'{{"k": {key}}}\n' for key in keys))
    return str(folder / "*.jsonl")


def test_the_client_agrees_with_the_golden_examples(node: str) -> None:
    golden = Path(str(flightedl_schemas.__file__)).with_name("golden.json")
    ran = subprocess.run(
        [node, str(HERE / "client.mjs"), "golden", str(golden)], capture_output=True, text=True, timeout=30, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"isSame": True}


@pytest.mark.faults
def test_a_node_client_reads_and_follows_evictions_and_the_death_of_a_pserver(node: str, tmp_path: Path) -> None:
    with (
        fe.local(
            pservers=2, checkpoint=str(tmp_path / "checkpoints"), checkpoint_every_s=1000.0, lease_ttl_s=2.0
        ) as cluster,
        cluster.connect() as job,
    ):
        data = iter(job.dataset(write_keys(tmp_path, 4, 8), batch_size=1))
        evict = fe.Evict(norm_below=1e-3, unused_versions=5)
        users = job.table("users", 3, optimizer=fe.SGD(lr=1.0), evict=evict, unknown="zero")
        model = job.parameters({"v": VECTOR, "m": MATRIX}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        step = 0

        def train(steps: int, small: Sequence[int] = ()) -> None:
            nonlocal step
            for _ in range(steps):
                next(data)
                users.push(small, np.full((len(small), 3), -1e-5, np.float32))
                users.push(np.arange(step * 20, step * 20 + 40) - 30, np.full((40, 3), -1.0, np.float32))
                model.step({"m": np.full_like(MATRIX, -1), "v": np.full_like(VECTOR, -0.5)})
                step += 1

        def is_same(found: Any) -> bool:
            model.pull()
            parameters = [np.array(found["parameters"][name], np.float32) for name in ("v", "m")]
            rows = {int(key): row for key, row in found["tables"]["users"].items()}
            return (
                np.array_equal(parameters[0], model["v"])
                and np.array_equal(parameters[1], model["m"].reshape(-1))
                and len(rows) == len(users)
                and np.array_equal(users.pull(list(rows)), np.array(list(rows.values()), np.float32))
            )

        with (
            started(node, "read", cluster) as reader,
            started(node, "follow", cluster) as follower,
            started(node, "follow", cluster, "bfloat16") as rounded,
        ):
            train(2)
            base = follower.ask()
            assert is_same(base)
            assert (base["seen"]["bases"], base["seen"]["increments"]) == (2, 0)
            assert len(base["tables"]["users"]) == 60
            train(1, range(5000, 5040))
            increment = follower.ask()
            assert is_same(increment)
            assert len(increment["tables"]["users"]) == 120
            options = ["--etcd", cluster.etcd_address, "--job", cluster.job]
            assert run_command_line(["checkpoint", "save", *options]) == 0
            evicted = follower.ask()
            assert is_same(evicted)
            assert evicted["seen"]["removed"] == 40
            train(6)
            expired = follower.ask()
            assert is_same(expired)
            assert expired["seen"]["expired"] > 0
            assert (expired["seen"]["bases"], expired["seen"]["ignored"]) == (2, 0)
            rows = {int(row["id"]): row["values"] for row in reader.ask("users")}
            assert rows == {int(key): row for key, row in expired["tables"]["users"].items()}
            assert [row["value"] for row in reader.ask("m")] == model["m"].tolist()
            assert [row["value"] for row in reader.ask("v")] == model["v"].tolist()
            short = rounded.ask()
            for name in ("v", "m"):
                expected = np.array(expired["parameters"][name], np.float32).astype(bfloat16).tolist()
                assert short["parameters"][name] == expected
            assert short["tables"] == expired["tables"], "the rows are small integers"
            cluster.kill("pserver", 1)
            train(3)
            assert eventually(lambda: is_same(follower.ask()), 30.0)
            assert follower.ask()["seen"]["bases"] == 3
        for _ in data:
            pass


def test_a_node_client_trains_and_each_repeated_gradient_counts_once(node: str, tmp_path: Path) -> None:
    """Key k of a record becomes a gradient of -1 for element and row k, in each of two epochs."""
    with fe.local(pservers=2) as cluster:
        with cluster.connect() as job:
            data = job.dataset(write_keys(tmp_path, 2, 8), batch_size=4, shuffle=True, seed=5, epochs=2)
            job.table("users", 3, optimizer=fe.SGD(lr=1.0))
            first = {"w": np.arange(16, dtype=np.float32), "v": VECTOR}
            job.parameters(first, optimizer=fe.SGD(lr=1.0), mode=fe.Sync(reduce="sum"))
            assert data.task_count == 2
        ran = subprocess.run(program(node, "train", cluster), capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen["parameters"] == {"w": [k + 2 for k in range(16)], "v": VECTOR.tolist()}
    assert seen["tables"] == {"users": {str(k): [2.0] * 3 for k in range(16)}}
    tasks = [[*range(task, task + 4), *range(task + 8, task + 12)] for task in (0, 4)]
    if drawn(np.array([8, 8]), np.array([1, 1]), 4, key_of(5, 0)).chunks[0]:
        tasks = [task[4:] + task[:4] for task in tasks]
    orders = {(e, task): np.array(tasks[task])[record_order(8, 5, e, task)] for e in (0, 1) for task in (0, 1)}
    batches = [seen["records"][start : start + 8] for start in range(0, 32, 8)]
    assert sorted(batches) == sorted(order.tolist() for order in orders.values())
    blocks = [reply["accepted"] for reply in seen["pushed"]]
    assert min(blocks) >= 1
    assert len(blocks) == 2 * 8
    assert [reply["already_applied"] for reply in seen["repeated"]] == blocks
    assert {reply["accepted"] for reply in seen["repeated"]} == {0}
    assert (seen["rowsPushed"], seen["rowsRepeated"]) == ([[1]] * 16, [[2]] * 16)
