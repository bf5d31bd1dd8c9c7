"""A cluster in memory: objects as they were given, without anybody who acts on them."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flightedl.errors import NotFoundError, UnavailableError


class MemoryCluster:
    """See ``ports.Cluster``. What owners own goes with them at once."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        #: Pod -> what it has said.
        self.output: dict[str, list[str]] = {}
        #: Pod -> answer to whatever it is asked to run.
        self.answers: dict[str, str] = {}
        self._uids = itertools.count(1)

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for each in copy.deepcopy(list(objects)):
            key = each["kind"], each["metadata"]["name"]
            known = self.objects.get(key, {"metadata": {"uid": f"uid-{next(self._uids)}"}})
            self.objects[key] = _merged(known, each)
            found.append(copy.deepcopy(self.objects[key]))
        return found

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.objects.get((kind, name)))

    def list(self, kind: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        return [
            copy.deepcopy(each)
            for (its_kind, _), each in sorted(self.objects.items())
            if its_kind == kind and labels.items() <= each["metadata"].get("labels", {}).items()
        ]

    def patch(self, kind: str, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        if (kind, name) not in self.objects:
            raise NotFoundError(f"there is no {kind} {name}")
        self.objects[kind, name] = _merged(self.objects[kind, name], changes)
        return copy.deepcopy(self.objects[kind, name])

    def delete(self, kind: str, name: str) -> None:
        gone = self.objects.pop((kind, name), None)
        if gone is None:
            return
        for key, each in list(self.objects.items()):
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in each["metadata"].get("ownerReferences", [])):
                self.delete(*key)

    @contextlib.contextmanager
    def logs(self, pod: str, *, follow: bool) -> Iterator[Iterable[str]]:  # noqa: ARG002 - nothing more comes
        yield iter(self.output.get(pod, []))

    def execute(self, pod: str, command: Sequence[str], timeout_s: float) -> str:  # noqa: ARG002 - it answers the same
        if pod not in self.answers:
            raise UnavailableError(f"nothing can be run in pod {pod}")
        return self.answers[pod]


def _merged(known: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON merge patch."""
    found = dict(known)
    for name, value in copy.deepcopy(dict(changes)).items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = _merged(found[name], value)
        else:
            found[name] = value
    return found
