"""A minimal node of a cluster: it runs pods as processes, as their manifests specify.

Commands, arguments, variables, probes, signals and grace periods are those of the pods. Each pod has its own loopback
address. Each mount becomes a folder, whose path replaces the mount path. Users, limits and file systems are those of
the test. Kernels that are already compiled are used, as if they were part of the image.

The node reads a :class:`~flightedl.ports.Cluster` and writes the status of its pods to it, so it also works with a real
API server.
"""

from __future__ import annotations

import base64
import http.client
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flightedl.errors import UnavailableError
from flightedl.ports import Cluster

Object = dict[str, Any]

#: Environment variables of the machine that every process inherits.
_OF_THE_NODE = ("PATH", "LANG", "TMPDIR", "SYSTEMROOT", "VIRTUAL_ENV", "PYTHONPATH")


@dataclass
class RunningPod:
    """A pod with running processes."""

    pod: Object
    address: str
    process: subprocess.Popen[bytes]
    #: Mount path -> folder.
    mounts: Mapping[str, Path]
    environment: Mapping[str, str]
    is_started: bool = False
    is_ready: bool = False
    ready_since: float = 0.0
    failures: int = 0
    #: Time at which to kill the pod, or None if it was not asked to end.
    kill_at: float | None = None
    probed: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def container(self) -> Object:
        (container,) = self.pod["spec"]["containers"]
        return dict(container)


class Node:
    """Runner of all pods with some labels, until it is closed."""

    def __init__(self, cluster: Cluster, folder: Path, labels: Mapping[str, str]) -> None:
        self.cluster = cluster
        self.running: dict[str, RunningPod] = {}
        #: Name of an ended pod -> its exit code.
        self.ended: dict[str, int] = {}
        self.problems: list[str] = []
        self._folder = folder
        self._labels = labels
        # Another user may run the same test concurrently.
        self.network = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        self._addresses = iter(range(1, 255))

    def new_address(self) -> str:
        """Return the address of the next pod."""
        return f"{self.network}.{next(self._addresses)}"

    def step(self) -> None:
        """Start new pods, end deleted ones, probe running ones, and report ended ones."""
        pods = {each["metadata"]["name"]: each for each in self.cluster.list("Pod", self._labels)}
        for name, pod in pods.items():
            if name not in self.running and name not in self.ended:
                self._start(pod)
        for name, running in list(self.running.items()):
            pod = pods.get(name)
            is_unwanted = pod is None or "deletionTimestamp" in pod["metadata"]
            if is_unwanted and running.kill_at is None:
                self._terminate(running)
            exit_code = running.process.poll()
            if exit_code is not None:
                self._has_ended(running, exit_code, is_unwanted=is_unwanted)
            elif running.kill_at is not None and time.monotonic() >= running.kill_at:
                self.problems.append(f"{name} is killed: it did not end in its grace period")
                running.process.kill()
            else:
                self._probe(running)

    def _start(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        address = self.new_address()
        place = self._folder / name
        (container,) = pod["spec"]["containers"]
        mounts = {
            mount["mountPath"]: self._volume(pod, mount["name"], place / mount["name"])
            for mount in container["volumeMounts"]
        }
        environment = {each: os.environ[each] for each in _OF_THE_NODE if each in os.environ}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
        environment |= {key: _mounted(value, mounts) for key, value in self._variables(pod, container, address)}
        environment.pop("NUMBA_CACHE_DIR", None)
        words = [_expanded(word, environment) for word in [*container["command"], *container["args"]]]
        command = [_mounted(word, mounts) for word in words]
        program = Path(sys.executable).parent / command[0]
        working = Path(_mounted(container["workingDir"], mounts))
        with (working / "output.log").open("ab") as log:
            process = subprocess.Popen(
                [str(program), *command[1:]],
                stdout=log,
                stderr=log,
                env=environment,
                cwd=working,
                start_new_session=True,
            )
        self.running[name] = RunningPod(pod, address, process, mounts, environment)
        self._tell(name, container, "Running", is_ready=False, address=address)

    def _volume(self, pod: Object, name: str, place: Path) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        volume = next((each for each in pod["spec"]["volumes"] if each["name"] == name), {})
        if "secret" in volume:
            secret = self.cluster.get("Secret", volume["secret"]["secretName"])
            assert secret is not None, f"pod waits for {volume}"
            for file, data in secret["data"].items():
                (place / file).write_bytes(base64.b64decode(data))
        if "configMap" in volume:
            texts = self.cluster.get("ConfigMap", volume["configMap"]["name"])
            assert texts is not None, f"pod waits for {volume}"
            for file, text in texts["data"].items():
                (place / file).write_text(text)
        return place

    def _variables(self, pod: Object, container: Object, address: str) -> Iterator[tuple[str, str]]:
        for source in container.get("envFrom", []):
            found = self.cluster.get("ConfigMap", source["configMapRef"]["name"])
            assert found is not None
            yield from found["data"].items()
        of_pod = {"status.podIP": address, "metadata.name": pod["metadata"]["name"]}
        for each in container["env"]:
            source = each.get("valueFrom")
            yield each["name"], each["value"] if source is None else of_pod[source["fieldRef"]["fieldPath"]]

    def _terminate(self, running: RunningPod) -> None:
        running.kill_at = time.monotonic() + running.pod["spec"]["terminationGracePeriodSeconds"]
        running.process.terminate()

    def _has_ended(self, running: RunningPod, exit_code: int, *, is_unwanted: bool) -> None:
        del self.running[running.name]
        self.ended[running.name] = exit_code
        if not is_unwanted and running.pod["spec"].get("restartPolicy", "Always") == "Always":
            self.problems.append(f"{running.name} ended by itself with {exit_code} and is started again")
            del self.ended[running.name]
            return
        self._tell(
            running.name, running.container, "Failed" if exit_code else "Succeeded", is_ready=False, exit_code=exit_code
        )
        if is_unwanted:
            self.finish(running.name)

    def finish(self, name: str) -> None:
        """Delete a pod that was asked to end."""
        self.cluster.delete("Pod", name)

    def _probe(self, running: RunningPod) -> None:
        container = running.container
        kinds = ("livenessProbe", "readinessProbe") if running.is_started else ("startupProbe",)
        if "startupProbe" not in container:
            if not running.is_ready:
                running.is_started = running.is_ready = True
                self._tell(running.name, running.container, "Running", is_ready=True, address=running.address)
            return
        for kind in kinds:
            probe = container[kind]
            now = time.monotonic()
            if now - running.probed.get(kind, 0.0) < probe["periodSeconds"]:
                continue
            running.probed[kind] = now
            self._judge(running, kind, probe, is_good=self._asks(running, probe))

    def _judge(self, running: RunningPod, kind: str, probe: Object, *, is_good: bool) -> None:
        if kind == "startupProbe":
            running.is_started = is_good
        elif kind == "readinessProbe" and is_good != running.is_ready:
            running.is_ready = is_good
            running.ready_since = time.monotonic()
            self._tell(running.name, running.container, "Running", is_ready=is_good, address=running.address)
        if kind == "livenessProbe":
            running.failures = 0 if is_good else running.failures + 1
            if running.failures >= probe["failureThreshold"] and running.kill_at is None:
                self.problems.append(f"{running.name} is not alive")
                self._terminate(running)

    def _asks(self, running: RunningPod, probe: Object) -> bool:
        ports = {each["name"]: each["containerPort"] for each in running.container["ports"]}
        target = probe["httpGet"]
        connection = http.client.HTTPConnection(running.address, ports[target["port"]], timeout=probe["timeoutSeconds"])
        try:
            connection.request("GET", target["path"])
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _tell(
        self,
        name: str,
        container: Object,
        phase: str,
        *,
        is_ready: bool,
        address: str = "",
        exit_code: int | None = None,
    ) -> None:
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": since}
        status: Object = {"phase": phase, "conditions": [ready]}
        if address:
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        if exit_code is not None:
            ended = {"exitCode": exit_code, "finishedAt": since}
            states = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
            status["containerStatuses"] = [states | {"ready": False, "state": {"terminated": ended}}]
        self.tell_status(name, status)

    def execute(self, pod: str, command: Sequence[str], timeout_s: float) -> str:
        """Run a command as in a pod; see ``ports.Cluster``."""
        running = self.running[pod]
        program = Path(sys.executable).parent / command[0]
        try:
            done = subprocess.run(
                [str(program), *command[1:]],
                env=running.environment,
                cwd=running.mounts["/work"],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(str(error)) from None
        if done.returncode:
            raise UnavailableError(done.stderr)
        return done.stdout

    def tell_status(self, name: str, status: Object) -> None:
        """Write the status of a pod."""
        self.cluster.patch("Pod", name, {"status": status})

    def close(self) -> None:
        """Kill all running pods."""
        for running in self.running.values():
            running.process.kill()
            running.process.wait()
        self.running.clear()


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by the variable's value."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], text)


def _mounted(text: str, mounts: Mapping[str, Path]) -> str:
    """Replace paths of mounts in a text by those of their folders. ``/tmp`` is that of the machine."""
    option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    for path, folder in mounts.items():
        if path != "/tmp" and (value == path or value.startswith(f"{path}/")):
            return f"{option}{equals}{folder}{value[len(path) :]}"
    return text
