"""Users' pod templates in the pods of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from flightedl.errors import UsageError
from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.templates import ROLES, PodTemplate
from flightedl.launch.kubernetes.values import ClusterJob, Resources, Scaling

JOB = ClusterJob(job="demo", image="demo:1", target="train.py", secret="store", scaling=Scaling())


def pods(*templates: PodTemplate, **changes: Any) -> dict[str, dict[str, Any]]:
    """Return the pod template of each role."""
    objects = render(replace(JOB, templates=templates, **changes))
    found = [each["spec"]["template"] for each in objects if "template" in each.get("spec", {})]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    return dict(pod["spec"]["containers"][0])


def test_nothing_changes_without_templates() -> None:
    assert pods() == pods(PodTemplate.of(ROLES, {"spec": {"containers": []}}))
    assert pods().keys() == set(ROLES)


def test_maps_are_merged_by_key_and_null_removes_an_entry() -> None:
    before = pods()["trainer"]
    gpu = {
        "kind": "Pod",
        "metadata": {"annotations": {"a": "b"}, "labels": {"team": "x"}},
        "spec": {
            "automountServiceAccountToken": None,
            "nodeSelector": {"gpu": "yes"},
            "securityContext": {"fsGroup": 5},
            "containers": [
                {
                    "name": "flightedl",
                    "resources": {"limits": {"nvidia.com/gpu": 2}},
                    "env": [{"name": "HOME", "value": "/home"}, {"name": "NEW", "value": "1"}],
                    "volumeMounts": [{"name": "work", "mountPath": "/work", "subPath": "s"}],
                    "envFrom": [{"secretRef": {"name": "more"}}],
                },
                {"name": "beside", "image": "proxy:1"},
            ],
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "n", "emptyDir": {}}],
        },
    }
    after = pods(PodTemplate.of(["trainer"], gpu))["trainer"]
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "PodTemplate", "template": after}, "1.36", strict=True)
    assert after["metadata"]["labels"] == before["metadata"]["labels"] | {"team": "x"}
    assert "automountServiceAccountToken" not in after["spec"]
    assert after["spec"]["securityContext"] == before["spec"]["securityContext"] | {"fsGroup": 5}
    own, beside = after["spec"]["containers"]
    assert (own["name"], beside) == ("trainer", {"name": "beside", "image": "proxy:1"})
    assert own["image"] == "demo:1"
    assert own["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 2}
    names = [each["name"] for each in container(before)["env"]]
    assert [each["name"] for each in own["env"]] == [*names, "NEW"]
    assert {"name": "HOME", "value": "/home"} in own["env"]
    assert own["envFrom"] == [*container(before)["envFrom"], {"secretRef": {"name": "more"}}]
    assert {"name": "work", "mountPath": "/work", "subPath": "s"} in own["volumeMounts"]
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}} in after["spec"]["volumes"]
    assert pods(PodTemplate.of(["trainer"], gpu))["master"] == pods()["master"]


def test_one_template_may_have_entries_for_several_roles() -> None:
    template = {"spec": {"containers": [{"name": role, "imagePullPolicy": "Never"} for role in ("trainer", "etcd")]}}
    found = pods(PodTemplate.of(ROLES, template))
    assert [role for role in ROLES if "imagePullPolicy" in container(found[role])] == ["trainer", "etcd"]
    assert all(len(each["spec"]["containers"]) == 1 for each in found.values())


def test_later_templates_win_and_tolerations_add_up() -> None:
    def of(key: str) -> PodTemplate:
        return PodTemplate.of(ROLES, {"spec": {"priorityClassName": key, "tolerations": [{"key": key}]}})

    spec = pods(of("a"), of("b"))["pserver"]["spec"]
    assert spec["priorityClassName"] == "b"
    assert spec["tolerations"] == [{"key": "a"}, {"key": "b"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, "has metadata and spec"),
        ({}, "has metadata and spec"),
        ({"template": {}}, "has metadata and spec"),
        ({"kind": "Deployment", "spec": {}}, "of the kind Pod, not Deployment"),
        ({"spec": []}, "spec of a pod template is not a map"),
        ({"spec": {"containers": {}}}, "containers of a pod template is not a list"),
        ({"spec": {"containers": [{"image": "x"}]}}, "entry of containers of a pod template has no name"),
        ({"spec": {"containers": ["x"]}}, "entry of containers of a pod template has no name"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "entry of volumes of a pod template has no name"),
        ({"metadata": {"labels": {"app.kubernetes.io/instance": "x"}}}, "must not change flightedl's labels"),
        ({"metadata": {"labels": None}}, "must not change flightedl's labels"),
        ({"metadata": None}, "must not change flightedl's labels"),
    ],
    ids=str,
)
def test_a_file_that_is_not_a_pod_template_is_rejected(template: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        pods(PodTemplate.of(ROLES, template))


def test_templates_limit_cpus_and_request_gpus() -> None:
    trainer = container(pods(trainer_resources=Resources("2", "1Gi", "8Gi", "4", 3))["trainer"])
    assert trainer["resources"] == {
        "requests": {"cpu": "2", "memory": "1Gi"},
        "limits": {"memory": "8Gi", "cpu": "4", "nvidia.com/gpu": "3"},
    }
    with pytest.raises(UsageError, match="cpu_limit is 'all'"):
        Resources(cpu_limit="all")
