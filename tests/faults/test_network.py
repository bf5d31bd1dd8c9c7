"""Networks that cut, delay, drop and damage data between real processes: every record counts once."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

import flightedl as fe
from flightedl.examples.ledger import balance
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.programs import TrainerProgram
from tests.support.etcd_server import EtcdServer
from tests.support.proxy import TcpProxy

from .interposed import KINDS, Interposer, strike

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

EPOCHS = 2


def job(tmp_path: Path, mode: str, **more: object) -> LocalCluster:
    arguments = ("--records", "6000", "--epochs", str(EPOCHS), "--pause", "0.02", "--per-task", "200", "--mode", mode)
    return fe.local(
        pservers=2,
        job="network",
        checkpoint=str(tmp_path / "ck"),
        checkpoint_every_s=2.0,
        output_dir=tmp_path / "out",
        lease_ttl_s=3.0,
        # On loopback only the proxy damages bytes.
        integrity="always",
        trainers=TrainerProgram("flightedl.examples.ledger", (*arguments, "--data", str(tmp_path / "data")), 3),
        **more,
    )


def require_exact(tmp_path: Path, cluster: LocalCluster) -> None:
    outcome = cluster.outcome(240)
    assert outcome is not None
    assert outcome.exit_code == 0, outcome
    with np.load(tmp_path / "out" / "ledger.npz") as counts:
        assert balance(counts) == (0, 0)


def test_every_record_counts_once_despite_network_faults_between_trainers_and_servers(tmp_path: Path) -> None:
    # Values in shared memory bypass the proxies.
    with job(tmp_path, "async", same_host="never") as cluster:
        with Interposer(cluster.etcd_address, "network", seed=1) as network:
            require_exact(tmp_path, cluster)
        assert network.done.keys() == set(KINDS), network.done
    print(dict(network.done))


def test_every_record_counts_once_despite_network_faults_to_etcd(tmp_path: Path, etcd: EtcdServer) -> None:
    chance = random.Random(2)
    stop = threading.Event()
    with TcpProxy(etcd.address) as proxy:

        def rage() -> None:
            while not stop.wait(chance.expovariate(1.0)):
                strike(proxy, chance.choice([kind for kind in KINDS if kind != "flip"]), chance)

        with job(tmp_path, "sync", etcd=proxy.address) as cluster:
            thread = threading.Thread(target=rage)
            thread.start()
            try:
                require_exact(tmp_path, cluster)
            finally:
                stop.set()
                thread.join()
