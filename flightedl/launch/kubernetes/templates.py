"""Merges users' pod templates into the pods of a job.

As in Kubernetes' strategic merge patches, maps are merged, ``null`` removes a field, and lists whose entries have a key
(``_KEYS``) are merged entry by entry. Entries of other lists of maps, such as tolerations and ``envFrom``, are
appended; Kubernetes would replace these lists, but a job needs its own entries. All other values are replaced.

A template refers to the process's own container as ``flightedl`` or by the pod's role. Containers with the names of
other roles are ignored, so one template may serve several roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flightedl.errors import UsageError

Object = dict[str, Any]

#: Kinds of pods that a job can have.
ROLES = ("trainer", "master", "pserver", "etcd", "autoscaler")
#: Name of a list -> the field that identifies the list's entries.
_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets"), "name"),
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
}


class PodTemplate(NamedTuple):
    """Metadata and a spec that are merged into the pods of some roles."""

    roles: Sequence[str]
    template: Mapping[str, Any]

    @classmethod
    def of(cls, roles: Sequence[str], found: Any) -> PodTemplate:
        """Convert the content of a file to a template. Raises UsageError if it is not a pod template."""
        if not isinstance(found, dict) or not found or found.keys() - {"apiVersion", "kind", "metadata", "spec"}:
            raise UsageError("a pod template has metadata and spec, as a Pod does, and nothing else")
        if found.get("kind", "Pod") != "Pod":
            raise UsageError(f"a pod template is of the kind Pod, not {found['kind']}")
        return cls(roles, {name: found[name] for name in ("metadata", "spec") if name in found})


def with_templates(objects: Sequence[Object], templates: Sequence[PodTemplate]) -> list[Object]:
    """Merge templates, in this order, into all objects that create pods.

    Raises:
        UsageError: a template does not have the shape of a pod, or changes labels that select pods.
    """
    return [_with_templates(each, templates) if "template" in each.get("spec", {}) else each for each in objects]


def _with_templates(found: Object, templates: Sequence[PodTemplate]) -> Object:
    template = before = found["spec"]["template"]
    role = before["metadata"]["labels"]["app.kubernetes.io/component"]
    for each in templates:
        if role in each.roles:
            template = _merged(template, each.template, "template", role)
    labels = template.get("metadata", {}).get("labels", {})
    if not before["metadata"]["labels"].items() <= labels.items():
        raise UsageError("a pod template must not change flightedl's labels, which select the pods of a job")
    return found | {"spec": found["spec"] | {"template": template}}


def _merged(before: Any, changes: Any, field: str, role: str) -> Any:
    """Merge a change into the previous value of a field, or into None if there is no value."""
    if isinstance(before, dict | list) and type(before) is not type(changes):
        raise UsageError(f"{field} of a pod template is not a {'map' if isinstance(before, dict) else 'list'}")
    if isinstance(changes, dict):
        found = {name: value for name, value in (before or {}).items() if changes.get(name, value) is not None}
        new = {name: value for name, value in changes.items() if value is not None}
        return found | {name: _merged(found.get(name), value, name, role) for name, value in new.items()}
    if not isinstance(changes, list):
        return changes
    if field not in _KEYS:
        return [*(before or []), *changes] if all(isinstance(each, dict) for each in changes) else changes
    key = _KEYS[field]
    if not all(isinstance(each, dict) and key in each for each in changes):
        raise UsageError(f"an entry of {field} of a pod template has no {key}")
    entries = {each[key]: each for each in before or []}
    for each in changes:
        name = role if field == "containers" and each[key] == "flightedl" else each[key]
        if field != "containers" or name == role or name not in ROLES:
            entries[name] = _merged(entries.get(name), each | {key: name}, field, role)
    return list(entries.values())
