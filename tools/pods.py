"""Options of ``flightedl submit`` that change pods, converted to pod templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from flightedl.errors import UsageError
from flightedl.launch.kubernetes.templates import ROLES, PodTemplate

from .documents import from_yaml
from .options import together

_VOLUME = re.compile(r"(?P<claim>[a-z0-9][a-z0-9.-]*):(?P<path>/[^:]*)(?P<read_only>:ro)?")
_TOLERATION = re.compile(r"(?P<key>[^=:]+)(=(?P<value>[^=:]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
#: Roles whose processes read data or write checkpoints.
_WORKING = ("trainer", "master", "pserver")
_POLICIES = click.Choice(["Always", "IfNotPresent", "Never"])


pod_options = together(
    click.option("--pod-template", "pod_templates", multiple=True, metavar="[ROLE=]FILE", help="Merge it into pods."),
    click.option("--priority-class", metavar="NAME", default="", help="Priority class of all pods."),
    click.option("--annotation", "annotations", multiple=True, metavar="KEY=VALUE", help="Annotation of all pods."),
    click.option("--service-account", metavar="NAME", default="", help="Service account of pods [without permissions]"),
    click.option("--image-pull-policy", type=_POLICIES, help="When nodes pull images [the cluster's default]"),
    click.option("--image-pull-secret", "pull_secrets", multiple=True, metavar="NAME", help="Secret of a registry."),
    click.option("--volume", "volumes", multiple=True, metavar="CLAIM:PATH[:ro]", help="Mount a volume claim."),
    click.option("--toleration", "tolerations", multiple=True, metavar="KEY[=VALUE][:EFFECT]", help="Of all pods."),
    click.option("--node-selector", "node_selectors", multiple=True, metavar="KEY=VALUE", help="Required node label."),
)


def templates_of(given: Mapping[str, Any]) -> tuple[PodTemplate, ...]:
    """Return the templates derived from options, followed by the templates from files.

    Raises:
        UsageError: an option or a file is invalid.
    """
    volumes = [_matched(_VOLUME, each, "CLAIM:PATH, or CLAIM:PATH:ro") for each in given["volumes"]]
    mounts = [
        {"name": f"claim-{number}", "mountPath": each["path"], "readOnly": bool(each["read_only"])}
        for number, each in enumerate(volumes)
    ]
    claims = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": each["claim"]}}
        for number, each in enumerate(volumes)
    ]
    every = {
        "nodeSelector": dict(map(pair_of, given["node_selectors"])) or None,
        "tolerations": list(map(_toleration, given["tolerations"])) or None,
        "imagePullSecrets": [{"name": name} for name in given["pull_secrets"]] or None,
        "priorityClassName": given["priority_class"] or None,
        "containers": [{"name": "flightedl", "imagePullPolicy": given["image_pull_policy"]}],
    }
    annotations = dict(map(pair_of, given["annotations"])) or None
    found = [
        PodTemplate(ROLES, {"metadata": {"annotations": annotations}, "spec": every}),
        PodTemplate(
            _WORKING, {"spec": {"volumes": claims, "containers": [{"name": "flightedl", "volumeMounts": mounts}]}}
        ),
    ]
    if account := given["service_account"]:
        # The autoscaler needs permissions, so it has its own account.
        found.append(PodTemplate(ROLES[:-1], {"spec": {"serviceAccountName": account}}))
    return (*found, *map(_of_file, given["pod_templates"]))


def pair_of(text: str) -> tuple[str, str]:
    """Parse ``KEY=VALUE``. Raises UsageError for anything else."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{text!r} is not KEY=VALUE")
    return key, value


def _toleration(text: str) -> dict[str, str]:
    found = _matched(_TOLERATION, text, "KEY, KEY=VALUE or either with :EFFECT (NoSchedule, NoExecute)")
    operator = "Exists" if found["value"] is None else "Equal"
    return {name: value for name, value in found.groupdict().items() if value} | {"operator": operator}


def _of_file(text: str) -> PodTemplate:
    role, equals, path = text.rpartition("=")
    if equals and role not in ROLES:
        raise UsageError(f"{role!r} is not a role of a pod: choose one of {', '.join(ROLES)}")
    try:
        return PodTemplate.of([role] if role else ROLES, from_yaml(Path(path)))
    except UsageError as error:
        raise UsageError(f"--pod-template {path}: {error}") from None


def _matched(pattern: re.Pattern[str], text: str, wanted: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not {wanted}")
    return match
