"""In-memory twin of ``ports.Cluster``. It stores objects as applied and collects garbage, but has no controllers."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flightedl.errors import NotFoundError, UnavailableError, UsageError
from flightedl.ports import Clock


class MemoryCluster:
    """In-memory twin of ``ports.Cluster``. As in Kubernetes, owners are identified by UID.

    The collector deletes an object ``collection_s`` seconds after its last owner was deleted. It identifies the object
    by UID, so applying the object again in the meantime does not save it.

    Args:
        clock: Clock that decides when to collect; None collects dependents at once.
        collection_s: Seconds between the deletion of an owner and the deletion of its dependents.
    """

    def __init__(self, clock: Clock | None = None, collection_s: float = 0.0) -> None:
        self._clock = clock
        self._collection_s = collection_s
        #: UID of an object -> time at which to collect it.
        self._doomed: dict[str, float] = {}
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        #: Pod -> lines in its log.
        self.output: dict[str, list[str]] = {}
        #: Pod -> output of every command that runs in it.
        self.answers: dict[str, str] = {}
        self._uids = itertools.count(1)

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        self._collect()
        found = []
        for each in copy.deepcopy(list(objects)):
            key = each["kind"], each["metadata"]["name"]
            known = self.objects.get(key, {"metadata": {"uid": f"uid-{next(self._uids)}"}})
            self.objects[key] = _merged(known, each)
            found.append(copy.deepcopy(self.objects[key]))
        uids = {each["metadata"]["uid"] for each in self.objects.values()}
        self._doom(each for each in found if (owners := _owners(each)) and not owners & uids)
        return found

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        self._collect()
        return copy.deepcopy(self.objects.get((kind, name)))

    def list(self, kind: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        self._collect()
        return [
            copy.deepcopy(each)
            for (its_kind, _), each in sorted(self.objects.items(), key=lambda item: item[0][::-1])
            if its_kind in kind.split(",") and labels.items() <= each["metadata"].get("labels", {}).items()
        ]

    def patch(self, kind: str, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        self._collect()
        if (kind, name) not in self.objects:
            raise NotFoundError(f"there is no {kind} {name}")
        uid = self.objects[kind, name]["metadata"]["uid"]
        if changes.get("metadata", {}).get("uid", uid) != uid:
            raise UsageError(f"{kind} {name} has another UID")
        self.objects[kind, name] = _merged(self.objects[kind, name], changes)
        return copy.deepcopy(self.objects[kind, name])

    def delete(self, kind: str, name: str) -> None:
        self._collect()
        gone = self.objects.pop((kind, name), None)
        if gone is not None:
            self._doom(each for each in self.objects.values() if gone["metadata"]["uid"] in _owners(each))

    def _doom(self, objects: Iterable[Mapping[str, Any]]) -> None:
        at = self._clock.now() + self._collection_s if self._clock else 0.0
        for each in objects:
            self._doomed.setdefault(each["metadata"]["uid"], at)
        self._collect()

    def _collect(self) -> None:
        now = self._clock.now() if self._clock else 0.0
        for uid, at in list(self._doomed.items()):
            if at <= now and self._doomed.pop(uid, None) is not None:
                for key in [key for key, each in self.objects.items() if each["metadata"]["uid"] == uid]:
                    self.delete(*key)

    @contextlib.contextmanager
    def logs(self, pod: str, *, follow: bool) -> Iterator[Iterable[str]]:
        yield iter(self.output.get(pod, []))

    def execute(self, pod: str, command: Sequence[str], timeout_s: float) -> str:
        if pod not in self.answers:
            raise UnavailableError(f"nothing can be run in pod {pod}")
        return self.answers[pod]


def _owners(each: Mapping[str, Any]) -> set[str]:
    return {owner["uid"] for owner in each["metadata"].get("ownerReferences", [])}


def _merged(known: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch (RFC 7386)."""
    found = dict(known)
    for name, value in copy.deepcopy(dict(changes)).items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = _merged(found[name], value)
        else:
            found[name] = value
    return found
