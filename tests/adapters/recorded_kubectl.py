"""Recorded answers of kubectl with a real Kubernetes.

Tests replay the answers. To record them again, with a cluster whose namespace ``flightedl-recording`` exists and is
empty::

    FLIGHTEDL_RECORD_KUBECTL=1 python -m pytest tests/adapters/test_kubectl.py tests/launch/kubernetes

A question consists of the command and of the kinds and names of its objects, but not of their contents: other tests
check objects against the schemas of Kubernetes. Answers are reduced to the fields that the code reads.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flightedl.adapters.kubectl import Ended, Kubectl, run_command

NAMESPACE = "flightedl-recording"
IS_RECORDING = bool(os.environ.get("FLIGHTEDL_RECORD_KUBECTL"))
_PLACE = Path(__file__).parent / "recorded"


def question(command: Sequence[str], given: str) -> list[str]:
    items = json.loads(given)["items"] if given else []
    return [*command, *(f"{each['kind']}/{each['metadata']['name']}" for each in items)]


def _pruned(output: str) -> str:
    """Return the answer without what merely repeats the question."""
    if not output.startswith("{"):
        return output
    found = json.loads(output)
    if found["kind"].endswith("List"):
        return json.dumps({"kind": found["kind"], "items": [_kept(each) for each in found["items"]]})
    return json.dumps(_kept(found))


def _kept(item: dict[str, Any]) -> dict[str, Any]:
    spec = {name: value for name, value in item.get("spec", {}).items() if name in {"parallelism", "suspend"}}
    metadata = {
        name: item["metadata"][name]
        for name in ("name", "uid", "labels", "annotations", "ownerReferences")
        if name in item["metadata"]
    }
    status = {name: value for name, value in item.get("status", {}).items() if name in {"phase", "active"}}
    found = {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": metadata,
        "spec": spec,
        "status": status,
    }
    return found | ({"data": item["data"]} if "data" in item else {})


@contextlib.contextmanager
def recorded(name: str) -> Iterator[Kubectl]:
    """Yield a cluster that replays the recorded answers in order. While recording, yield the real cluster."""
    path = _PLACE / f"{name}.json"
    if IS_RECORDING:
        exchanges: list[list[object]] = []

        def ask(command: Sequence[str], given: str, timeout_s: float) -> Ended:
            ended = run_command(command, given, timeout_s)
            exchanges.append([question(command, given), *ended._replace(output=_pruned(ended.output))])
            return ended

        yield Kubectl(NAMESPACE, run=ask)
        path.parent.mkdir(exist_ok=True)
        path.write_text("[\n" + ",\n".join(json.dumps(each) for each in exchanges) + "\n]\n")
        return
    answers = iter(json.loads(path.read_text()))

    def answer(command: Sequence[str], given: str, _timeout_s: float) -> Ended:
        known, exit_code, output, error = next(answers)
        assert question(command, given) == known, f"the question differs from the one recorded in {path.name}"
        return Ended(exit_code, output, error)

    yield Kubectl(NAMESPACE, run=answer)
    assert next(answers, None) is None, f"some questions recorded in {path.name} were not asked"
