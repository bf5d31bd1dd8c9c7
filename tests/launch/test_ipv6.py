"""A whole job on a machine whose loopback interface has only the address of IPv6."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(240)]

#: Removes IPv4 from the namespace's own loopback interface, and then runs the command.
_COMMAND = """
import fcntl, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 0x49))  # SIOCSIFFLAGS: up, loopback, running
    fcntl.ioctl(control, 0x8916, struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, bytes(4)))  # SIOCSIFADDR
try:
    socket.create_server(("127.0.0.1", 0)).close()
except OSError:
    print("there is no IPv4", flush=True)
from flightedl_tools.main import main
main(sys.argv[1:])
"""
_SCRIPT = """
import os, socket, urllib.request
import numpy as np
import flightedl as fe

with fe.connect() as job:
    model = job.parameters({"w": np.zeros(2, np.float32)}, optimizer=fe.SGD(lr=1.0))
    for batch in job.dataset("data.csv", batch_size=4):
        model.step({"w": np.ones(2, np.float32)})
    model.pull()
    print("trained", model["w"].tolist(), os.environ["FLIGHTEDL_ETCD"].rpartition(":")[0])
"""


def test_a_job_runs_without_ipv4(tmp_path: Path) -> None:
    alone = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system permits no network namespaces")
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "data.csv").write_text("x\n" + "1\n" * 16)
    options = ["--pservers", "1", "--output", "out", "--lease-ttl-s", "60"]
    done = subprocess.run(
        [*alone, sys.executable, "-c", _COMMAND, "run", "train.py", *options],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is no IPv4" in done.stdout
    assert "trained [-4.0, -4.0] [::1]" in done.stdout
    assert "http://[::1]:" in done.stdout + done.stderr
