"""A cluster accessed through ``kubectl``, so that any cluster that is reachable from a shell can be used.

kubectl supports kubeconfig files, contexts, login plugins and the account of a pod, and is maintained together with
Kubernetes. So no client library is needed, and cluster users need not install anything.

Errors are classified by the reason in the API's answer, which kubectl writes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flightedl.errors import (
    AuthenticationError,
    DeadlineError,
    FlightedlError,
    NotFoundError,
    UnavailableError,
    UsageError,
)

_PROGRAM = "kubectl"
_TIMEOUT_S = 60.0
_OWNER = "flightedl"
_REASON = re.compile(r"Error from server \((\w+)\)")
#: Lines that kubectl writes before the error: warnings, and its own log messages.
_CHATTER = re.compile(r"Warning:|[EWI]\d{4} ")
_LONGEST_ERROR = 600
_ERRORS: Mapping[str, type[FlightedlError]] = {
    "NotFound": NotFoundError,
    "Forbidden": AuthenticationError,
    "Unauthorized": AuthenticationError,
    "Invalid": UsageError,
    "BadRequest": UsageError,
    "AlreadyExists": UsageError,
    "Conflict": UsageError,
}
#: Parts of error messages that lack the reason from the API, although the user must correct the error.
_OURS = re.compile(
    r"strict decoding error|no context exists|unknown flag|unable to recognize|no matches for kind|\" is invalid: "
    r"|error validating|error parsing|failed to create typed|admission webhook .* denied|doesn't have a resource type"
)


class Ended(NamedTuple):
    """Result of a command."""

    exit_code: int
    output: str
    error: str


#: Runs a command with an input and a timeout in seconds.
Run = Callable[[Sequence[str], str, float], Ended]


def run_command(command: Sequence[str], given: str, timeout_s: float) -> Ended:
    """Run a command on this machine.

    Raises:
        UsageError: the program is not installed.
        DeadlineError: the command exceeded the time limit.
    """
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise UsageError(
            f"{command[0]} is not on PATH: install it, and check that `{command[0]} get pods` works"
        ) from None
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"{command[0]} did not finish within {timeout_s:.0f} s") from None
    return Ended(done.returncode, done.stdout, done.stderr)


class Kubectl:
    """Implementation of ``ports.Cluster``.

    Args:
        namespace: Namespace; empty for the context's namespace.
        context: Context of the kubeconfig; empty for the current context.
        run: Function that runs kubectl.
    """

    def __init__(self, namespace: str = "", context: str = "", run: Run = run_command) -> None:
        chosen = [f"--namespace={namespace}"] if namespace else []
        self._command = [_PROGRAM, *chosen, *([f"--context={context}"] if context else [])]
        self._run = run

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        arguments = ["apply", "--server-side", "--force-conflicts", f"--field-manager={_OWNER}", "--filename=-"]
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        return _items(self._ask([*arguments, "--output=json"], given))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        output = self._ask(["get", kind, name, "--ignore-not-found", "--output=json"])
        return None if not output.strip() else _object(output)

    def list(self, kind: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        found = _items(self._ask(["get", kind, f"--selector={selector}", "--output=json"]))
        return sorted(found, key=lambda each: str(each["metadata"]["name"]))

    def patch(self, kind: str, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        given = json.dumps(changes)
        return _object(self._ask(["patch", kind, name, "--type=merge", f"--patch={given}", "--output=json"]))

    def delete(self, kind: str, name: str) -> None:
        self._ask(["delete", kind, name, "--cascade=background", "--ignore-not-found", "--wait=false"])

    @contextlib.contextmanager
    def logs(self, pod: str, *, follow: bool) -> Iterator[Iterable[str]]:
        command = [*self._command, "logs", pod, *(["--follow"] if follow else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None, "a pipe was requested"
            try:
                yield (line.rstrip("\n") for line in process.stdout)
            finally:
                process.terminate()

    def execute(self, pod: str, command: Sequence[str], timeout_s: float) -> str:
        done = self._run([*self._command, "exec", pod, "--", *command], "", timeout_s)
        if done.exit_code:
            raise UnavailableError(f"{command[0]} in pod {pod} failed ({done.exit_code}): {_in_one_line(done.error)}")
        return done.output

    def _ask(self, arguments: Sequence[str], given: str = "") -> str:
        done = self._run([*self._command, *arguments], given, _TIMEOUT_S)
        if done.exit_code:
            raise _error(done.error)
        return done.output


def _items(output: str) -> list[dict[str, Any]]:
    found = _object(output)
    items: list[dict[str, Any]] = found["items"] if found["kind"].endswith("List") else [found]
    return items


def _object(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output)
    return found


def _error(message: str) -> FlightedlError:
    reason = _REASON.search(message)
    line = _in_one_line(message)
    if reason is not None:
        return _ERRORS.get(reason[1], UnavailableError)(f"the cluster refuses: {line}")
    if _OURS.search(message):
        return UsageError(f"the cluster refuses: {line}")
    return UnavailableError(f"the cluster does not answer: {line}")


def _in_one_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip() and not _CHATTER.match(line)]
    return " ".join(lines)[:_LONGEST_ERROR] if lines else "kubectl printed no message"
