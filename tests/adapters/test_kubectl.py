"""The kubectl adapter: its contract with recorded answers of a real Kubernetes, and the mapping of errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from flightedl.adapters.kubectl import Ended, Kubectl, run_command
from flightedl.errors import (
    AuthenticationError,
    DeadlineError,
    FlightedlError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from tests.support.contracts.cluster import ClusterContract

from .recorded_kubectl import IS_RECORDING, NAMESPACE, recorded


class TestContract(ClusterContract):
    @pytest.fixture
    def cluster(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubectl]:
        if IS_RECORDING:
            clear = ["kubectl", "-n", NAMESPACE, "delete", "configmap", "--all"]
            subprocess.run(clear, capture_output=True, check=True)
        else:
            monkeypatch.setattr(subprocess, "Popen", _silent)
        with recorded(request.node.name) as cluster:
            yield cluster


def _silent(_command: Sequence[str], **given: object) -> subprocess.Popen[str]:
    """Return an adapter without a cluster, for output that is not recorded: that of an absent pod."""
    return _POPEN([sys.executable, "-c", ""], **given)  # type: ignore[call-overload, no-any-return]


_POPEN = subprocess.Popen


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ('Error from server (NotFound): jobs.batch "x" not found', NotFoundError),
        ('Error from server (Forbidden): jobs.batch is forbidden: User "u" cannot list', AuthenticationError),
        ("error: You must be logged in to the server (Unauthorized)", UnavailableError),
        ('Warning: old\nError from server (Invalid): Job.batch "x" is invalid: spec.parallelism', UsageError),
        ("Error from server (BadRequest): strict decoding error: unknown field", UsageError),
        ("Error from server (ServiceUnavailable): the server is starting", UnavailableError),
        ("Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout", UnavailableError),
        ('error: context "absent" does not exist: no context exists with the name', UsageError),
        (
            'The ConfigMap "c" is invalid: data[a b.txt]: Invalid value: "a b.txt": a valid config key must consist of',
            UsageError,
        ),
        ("error: error validating data: ValidationError(Job.spec): unknown field", UsageError),
        ("Error from server: failed to create typed patch object: .spec.x: field not declared in schema", UsageError),
        ('Error from server: admission webhook "w" denied the request: no such queue', UsageError),
        ("Error from server: etcdserver: request timed out", UnavailableError),
        ("", UnavailableError),
    ],
)
def test_kubectl_errors_are_mapped_to_flightedl_errors(message: str, kind: type[FlightedlError]) -> None:
    cluster = Kubectl(run=lambda *_: Ended(1, "", message))
    with pytest.raises(FlightedlError) as caught:
        cluster.get("Job", "x")
    assert type(caught.value) is kind


def test_an_error_keeps_all_its_lines_but_not_the_output_before_it() -> None:
    message = (
        "Warning: old\nE1124 14:16:42.1 1 memcache.go:265] couldn't get the list\n"
        'The Job "x" is invalid: \n* spec.a: Required value\n* spec.b: too long\n'
    )
    with pytest.raises(UsageError, match=r'The Job "x" is invalid: \* spec.a: Required value \* spec.b: too long$'):
        Kubectl(run=lambda *_: Ended(1, "", message)).get("Job", "x")


def test_namespace_and_context_are_passed_to_kubectl() -> None:
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str], _given: str, _timeout_s: float) -> Ended:
        asked.append(command)
        return Ended(0, "", "")

    Kubectl("mine", "there", run).get("Job", "x")
    Kubectl(run=run).get("Job", "x")
    assert asked[0][:3] == ["kubectl", "--namespace=mine", "--context=there"]
    assert asked[1][:2] == ["kubectl", "get"]


def test_a_missing_or_slow_command_raises_one_sentence() -> None:
    with pytest.raises(UsageError, match="no-such-program is not on PATH"):
        run_command(["no-such-program"], "", 5.0)
    with pytest.raises(DeadlineError, match="did not finish within 0 s"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], "", 0.1)
    assert run_command([sys.executable, "-c", "print(input())"], "hello", 20.0) == (0, "hello\n", "")
