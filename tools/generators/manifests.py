"""Generator of the kustomize manifests in ``deploy/``, for developers.

    python -m tools.generators.manifests

A component is the difference between two renderings of a job: objects that only the second one contains become
resources, and objects that differ become patches. So all manifests in ``deploy/`` come from the same code, and overlays
are composed of tested components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.pods import Object
from flightedl.launch.kubernetes.values import ClusterJob, Resources, Scaling
from flightedl_tools.documents import as_yaml
from tools.generators import one_pod

#: The base has neither certificates nor an etcd. The overlays add them.
BASE = ClusterJob(job="train", image="flightedl", target="/app/train.py", etcd_members=0, tls=False)
_SMALL = Resources("100m", "256Mi", "2Gi")
_TLS: Mapping[str, Any] = {"tls": True}
_STORE: Mapping[str, Any] = {"checkpoint": "s3://bucket/checkpoints", "secret": "train-store", "resume": "auto"}
_SCALING: Mapping[str, Any] = {"scaling": Scaling(1, 10)}


class Component(NamedTuple):
    """Changes to a job's values. ``on`` contains the values that these changes depend on."""

    comment: str
    changes: Mapping[str, Any]
    on: Mapping[str, Any] = {}


COMPONENTS: Mapping[str, Component] = {
    "tls": Component("Certificates from the Secrets train-server and train-trainer: `flightedl certs create`.", _TLS),
    "insecure": Component("No certificates: anyone who can reach the pods has full access.", {"insecure": True}),
    "etcd-1": Component("An etcd with one member, in plain text.", {"etcd_members": 1}),
    "etcd-1-tls": Component(
        "With tls: an etcd with one member, and the Secret train-etcd.", {"etcd_members": 1}, on=_TLS
    ),
    "etcd-3-tls": Component(
        "With tls: an etcd with three members, and the Secret train-etcd.", {"etcd_members": 3}, on=_TLS
    ),
    "etcd-external": Component("An existing etcd: change its address.", {"etcd": "etcd.example:2379"}),
    "s3": Component(
        "Checkpoints on S3, from which a job lost by etcd is resumed; the Secret train-store has AWS_ACCESS_KEY_ID.",
        _STORE,
    ),
    "store-port": Component(
        "A store on a port other than 443, such as MinIO: change its address, and the port in the network policy.",
        {"variables": {"AWS_ENDPOINT_URL": "http://minio.example:9000"}},
    ),
    "autoscale": Component(
        "With tls: an autoscaler that adds and removes trainers, and the Secret train-reader.", _SCALING, on=_TLS
    ),
    "standby": Component(
        "A standby for each of the two pservers: it copies the pserver's blocks, and takes over if the pserver dies.",
        {"standby_pservers": 2},
    ),
    "small": Component(
        "For a laptop: one master, no spare pserver, little memory.",
        {"masters": 1, "spares": 0, "server_resources": _SMALL, "trainer_resources": _SMALL},
    ),
}

#: Overlay -> its components, in order.
OVERLAYS: Mapping[str, Sequence[str]] = {
    "local": ("insecure", "etcd-1", "small"),
    "tls": ("tls", "etcd-1-tls"),
    "s3": ("tls", "etcd-1-tls", "s3"),
    "etcd-1": ("tls", "etcd-1-tls"),
    "etcd-3": ("tls", "etcd-3-tls", "s3"),
    "etcd-external": ("tls", "etcd-external", "s3"),
    "autoscale": ("tls", "etcd-3-tls", "s3", "autoscale"),
}

#: Folders in ``deploy/`` that contain only generated YAML files.
FOLDERS = ("base", "components", "overlays")
#: Values of a job that fits on one machine.
ONE_POD = replace(BASE, checkpoint="s3://bucket/checkpoints", secret="train-store")  # noqa: S106 - a name


def job_of(overlay: str) -> ClusterJob:
    """Return the values of the job whose rendered objects must equal the overlay."""
    changes: dict[str, Any] = {}
    for name in OVERLAYS[overlay]:
        changes |= COMPONENTS[name].changes
    return replace(BASE, **changes)


def files() -> dict[str, str]:
    """Return the generated files: path in ``deploy/`` -> content."""
    found = _directory("base", "resources", _by_part(render(BASE)), "Kustomization")
    for name, component in COMPONENTS.items():
        found |= _component(name, component)
    for name, parts in OVERLAYS.items():
        lines = {"resources": ["../../base"], "components": [f"../../components/{part}" for part in parts]}
        found[f"overlays/{name}/kustomization.yaml"] = _kustomization("Kustomization", lines)
    found |= _directory("overlays/one-pod", "resources", _by_part(one_pod.render(ONE_POD)), "Kustomization")
    return found


def write(directory: Path) -> None:
    """Write all files, and remove generated files that no longer exist."""
    for folder in FOLDERS:
        for path in (directory / folder).rglob("*.yaml"):
            path.unlink()
    for name, text in files().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def _component(name: str, component: Component) -> dict[str, str]:
    before = {_key(each): each for each in render(replace(BASE, **component.on))}
    after = {_key(each): each for each in render(replace(BASE, **component.on, **component.changes))}
    assert before.keys() <= after.keys(), "a component removes nothing"
    new = [each for key, each in after.items() if key not in before]
    patches = [
        {"apiVersion": each["apiVersion"], "kind": each["kind"], "metadata": {"name": each["metadata"]["name"]}}
        | difference(each, after[key])
        for key, each in before.items()
        if each != after[key]
    ]
    lines: dict[str, Any] = {}
    found = {}
    if new:
        lines["resources"] = ["resources.yaml"]
        found[f"components/{name}/resources.yaml"] = as_yaml(new)
    if patches:
        lines["patches"] = [{"path": "patches.yaml"}]
        found[f"components/{name}/patches.yaml"] = as_yaml(patches)
    found[f"components/{name}/kustomization.yaml"] = _kustomization("Component", lines, component.comment)
    return found


def difference(before: Object, after: Object) -> Object:
    """Return the strategic merge patch that changes ``before`` to ``after``."""
    assert before.keys() <= after.keys(), f"a patch cannot remove {before.keys() - after.keys()}"
    found = {}
    for key, value in after.items():
        if key not in before:
            found[key] = value
        elif before[key] != value:
            if isinstance(value, dict):
                found[key] = difference(before[key], value)
            elif isinstance(value, list) and all(isinstance(each, dict) and _merged_by(each) for each in value):
                found[key] = _list_difference(before[key], value)
            else:
                found[key] = value
    return found


def _list_difference(before: list[Object], after: list[Object]) -> list[Object]:
    named = {each[_merged_by(each)]: each for each in before}
    found = []
    for each in after:
        name = _merged_by(each)
        known = named.get(each[name])
        if known is None:
            found.append(each)
        elif known != each:
            found.append({name: each[name]} | difference(known, each))
    return found


def _merged_by(item: Object) -> str:
    """Return the field by which Kubernetes merges the entries of this list, or "" if it replaces the whole list."""
    return next((name for name in ("mountPath", "name") if name in item), "")


def _key(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _by_part(objects: Sequence[Object]) -> dict[str, list[Object]]:
    """Group the objects by part of the job, with one file per part."""
    found: dict[str, list[Object]] = {}
    for each in objects:
        part = each["metadata"]["labels"].get("app.kubernetes.io/component", "")
        common = "network" if each["kind"] == "NetworkPolicy" else "settings"
        found.setdefault(part or common, []).append(each)
    return found


def _directory(directory: str, field: str, parts: Mapping[str, Sequence[Object]], kind: str) -> dict[str, str]:
    found = {f"{directory}/{part}.yaml": as_yaml(objects) for part, objects in parts.items()}
    found[f"{directory}/kustomization.yaml"] = _kustomization(kind, {field: [f"{part}.yaml" for part in parts]})
    return found


def _kustomization(kind: str, lines: Mapping[str, Any], comment: str = "") -> str:
    version = "kustomize.config.k8s.io/v1alpha1" if kind == "Component" else "kustomize.config.k8s.io/v1beta1"
    head = "# Written by `python -m tools.generators.manifests`.\n" + (f"# {comment}\n" if comment else "")
    return head + str(as_yaml([{"apiVersion": version, "kind": kind, **lines}]))


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2] / "deploy")
