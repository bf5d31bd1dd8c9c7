"""The manifests match the code, Kubernetes' schemas and the overlays."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from flightedl.config import ENVIRONMENT_PREFIX, MasterSettings, PserverSettings, TrainerSettings, tuned_environment
from flightedl.errors import UsageError
from flightedl.launch.kubernetes.objects import render, require_common_place
from flightedl.launch.kubernetes.values import ClusterJob, Resources, Scaling
from tools.generators import manifests, one_pod

DEPLOY = Path(__file__).parents[2] / "deploy"
#: Versions of Kubernetes: the oldest with every feature in use, and a recent one.
VERSIONS = ("1.31", "1.36")
STABLE = {"v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1"}
VARIABLES = {
    ENVIRONMENT_PREFIX + field.name.upper()
    for kind in (MasterSettings, PserverSettings, TrainerSettings)
    for field in fields(kind)
}
FULL = ClusterJob(
    job="demo",
    image="demo:1",
    target="/code/train.py",
    arguments=("--fast",),
    code={"train.py": "import flightedl\n"},
    checkpoint="s3://bucket/demo",
    secret="store",
    etcd_members=3,
    scaling=Scaling(1, 5, hourly_cost=0.5, hourly_limit=2.0),
)
JOBS = {
    "full": FULL,
    "insecure": replace(FULL, tls=False, insecure=True, etcd="etcd.example:2379", code={}, secret="", scaling=None),
    "group": replace(FULL, ranks=4, trainers=1, pservers=0, spares=0, scaling=None),
    **{name: manifests.job_of(name) for name in manifests.OVERLAYS},
}

Object = dict[str, Any]


def pods(objects: list[Object]) -> dict[str, Object]:
    """Return the pod template of each component."""
    templates = [each["spec"]["template"] for each in objects if "template" in each.get("spec", {})]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in templates}


def test_every_manifest_matches_the_code() -> None:
    found = {
        str(path.relative_to(DEPLOY)): path.read_text()
        for folder in manifests.FOLDERS
        for path in (DEPLOY / folder).rglob("*.yaml")
    }
    assert found == manifests.files(), "run `python -m tools.generators.manifests`"


@functools.cache
def built(overlay: str) -> list[Object]:
    """Return the objects that kubectl builds from an overlay."""
    command = ["kubectl", "kustomize", str(DEPLOY / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.slow
def test_overlays_equal_the_objects_of_submit() -> None:
    assert shutil.which("kubectl"), "install kubectl 1.27 or newer: Debian's package kubectl or kubernetes-client"
    names = [*manifests.OVERLAYS, "one-pod"]
    with ThreadPoolExecutor(4) as executor:
        found = dict(zip(names, executor.map(built, names), strict=True))
    for overlay, objects in found.items():
        expected = one_pod.render(manifests.ONE_POD) if overlay == "one-pod" else render(manifests.job_of(overlay))
        assert by_name(objects) == by_name(expected), overlay


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Convert lists that Kubernetes treats as maps to maps, because their order is irrelevant."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            keys = [each.get("mountPath", each.get("name")) if isinstance(each, dict) else None for each in value]
            return (
                dict(zip(keys, map(plain, value), strict=True))
                if None not in keys and keys
                else list(map(plain, value))
            )
        return value

    return {(each["kind"], each["metadata"]["name"]): plain(each) for each in objects}


@pytest.mark.parametrize("name", ["full", "insecure", "group", "local"])
def test_objects_use_stable_apis_and_match_their_schemas(name: str) -> None:
    job = JOBS[name]
    for each in json.loads(json.dumps([*render(job), *one_pod.render(job)])):
        assert each["apiVersion"] in STABLE
        for version in VERSIONS if job is FULL else VERSIONS[-1:]:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_setting_exists_and_every_process_is_tuned(job: ClusterJob) -> None:
    objects = render(job)
    (settings,) = (
        each["data"] for each in objects if each["kind"] == "ConfigMap" and each["metadata"]["name"] == job.job
    )
    assert settings.keys() <= VARIABLES
    for component, template in pods(objects).items():
        (container,) = template["spec"]["containers"]
        variables = {each["name"]: each.get("value", "") for each in container["env"]}
        assert {name for name in variables if name.startswith(ENVIRONMENT_PREFIX)} <= VARIABLES
        if component != "etcd":
            assert variables.items() >= tuned_environment().items()
            assert {"configMapRef": {"name": job.job}} in container["envFrom"]


@pytest.mark.parametrize(("notice", "has_token"), [("aws", False), ("kubernetes", True)])
def test_pods_that_watch_for_notices_have_what_they_need(notice: str, has_token: bool) -> None:
    job = replace(FULL, notice=notice, leave_s=40)
    for component, template in pods(render(job)).items():
        spec = template["spec"]
        found = {
            each["name"]: each
            for each in spec["containers"][0]["env"]
            if each["name"] in {"FLIGHTEDL_NOTICE", "FLIGHTEDL_NODE"}
        }
        if component in {"trainer", "master", "pserver"}:
            assert spec["automountServiceAccountToken"] is has_token
            assert found["FLIGHTEDL_NOTICE"]["value"] == notice
            assert found["FLIGHTEDL_NODE"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
        else:
            assert not found
    grace = {name: each["spec"].get("terminationGracePeriodSeconds") for name, each in pods(render(job)).items()}
    assert grace["pserver"] == grace["master"] + 40


@pytest.mark.parametrize("objects", [*map(render, JOBS.values()), one_pod.render(FULL)], ids=[*JOBS, "one-pod"])
def test_pods_have_no_unneeded_privileges(objects: list[Object]) -> None:
    for component, template in pods(objects).items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is (component == "autoscaler")
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"].keys() == {"requests", "limits"}
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            claims = {"data"} if component == "etcd" else set()
            assert mounts == {volume["name"] for volume in spec["volumes"]} | claims


def test_only_the_autoscaler_has_rights_and_they_are_few() -> None:
    objects = render(FULL)
    (role,) = (each for each in objects if each["kind"] == "Role")
    assert role["rules"] == [
        {"apiGroups": ["batch"], "resources": ["jobs"], "resourceNames": ["demo-trainer"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    (binding,) = (each for each in objects if each["kind"] == "RoleBinding")
    assert [each["name"] for each in binding["subjects"]] == ["demo-autoscaler"]
    assert not any(each["kind"].startswith("Cluster") for each in objects)


def test_policies_deny_everything_that_they_do_not_allow() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in render(FULL) if each["kind"] == "NetworkPolicy"}
    deny = policies["demo-deny"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert deny.keys() == {"podSelector", "policyTypes"}
    labels = deny["podSelector"]["matchLabels"].items()
    for template in pods(render(FULL)).values():
        assert labels <= template["metadata"]["labels"].items(), "the default policy must select every pod"
    for name in ("demo-master", "demo-pserver"):
        ports = [port["port"] for rule in policies[name]["ingress"] for port in rule["ports"]]
        assert ports == [7070, 9090], "policies do not block probes from the node"


def test_policies_allow_stores_on_other_ports_and_the_metadata_service() -> None:
    def egress(**changes: Any) -> dict[str, list[Any]]:
        objects = render(replace(FULL, **changes))
        specs = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "NetworkPolicy"}
        return {
            name: [p["port"] for rule in spec["egress"] for p in rule["ports"]]
            for name, spec in specs.items()
            if spec.get("egress") and name != "demo-leave"
        }

    (leave,) = (each["spec"]["egress"] for each in render(FULL) if each["metadata"]["name"] == "demo-leave")
    assert leave[-1]["to"] == [{"ipBlock": {"cidr": "169.254.0.0/16"}}]
    assert 80 in [port["port"] for port in leave[-1]["ports"]]
    assert egress() == {}
    minio = {"variables": {"AWS_ENDPOINT_URL": "http://minio.store:9000", "MODE": "a:b"}, "egress_ports": (8020,)}
    assert egress(**minio) == {"demo-stores": [8020, 9000]}
    data = ("http://files/x", "hdfs://name:8021/y", "https://files", "x://y:z", "--rate=1")
    assert egress(arguments=data, etcd="e:2379,f:2380") == {
        "demo-external-etcd": [2379, 2380],
        "demo-stores": [80, 8021],
    }


@pytest.mark.parametrize(
    ("checkpoint", "is_lost"),
    [("s3://b/c", False), ("", False), ("/work/x", True), ("file:///models", True), ("memory://x", True), ("x", True)],
)
def test_checkpoints_are_not_stored_on_volumes_of_a_pod(checkpoint: str, is_lost: bool) -> None:
    if is_lost:
        with pytest.raises(UsageError, match="would be lost with each pod"):
            require_common_place(checkpoint, render(FULL))
    else:
        require_common_place(checkpoint, render(FULL))


def test_servers_have_separate_probes_and_time_to_drain() -> None:
    templates = pods(render(FULL))
    for role in ("master", "pserver"):
        spec = templates[role]["spec"]
        (container,) = spec["containers"]
        paths = [container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
        assert paths == ["/started", "/live", "/ready"]
        assert spec["terminationGracePeriodSeconds"] > FULL.drain_s
    budgets = {each["metadata"]["name"] for each in render(FULL) if each["kind"] == "PodDisruptionBudget"}
    assert budgets == {"demo-master", "demo-pserver", "demo-etcd"}


def test_the_trainers_are_a_job_with_one_completion_and_variable_parallelism() -> None:
    (job,) = (each["spec"] for each in render(FULL) if each["kind"] == "Job")
    assert "completions" not in job
    assert job["parallelism"] == FULL.trainers
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    actions = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in job["podFailurePolicy"]["rules"]]
    assert actions == [("Ignore", None), ("Ignore", [75, 143]), ("FailJob", [2, 3, 4])]


@pytest.mark.parametrize(
    ("changes", "image"),
    [
        ({"etcd_members": 1}, "demo:1"),
        ({"etcd_members": 3}, "gcr.io/etcd-development/etcd:v3.5.28"),
        ({"etcd_members": 3, "etcd_image": "mine:2"}, "mine:2"),
    ],
    ids=["one", "three", "given"],
)
def test_an_etcd_with_several_members_has_a_sound_version(changes: dict[str, Any], image: str) -> None:
    (container,) = pods(render(replace(FULL, **changes)))["etcd"]["spec"]["containers"]
    assert (container["image"], container["command"]) == (image, ["etcd"])


def test_the_manifests_have_a_spare_pserver_and_a_standby_master() -> None:
    replicas = {
        each["metadata"]["name"]: each["spec"]["replicas"] for each in render(FULL) if each["kind"] == "Deployment"
    }
    assert replicas == {"demo-master": 2, "demo-pserver": FULL.pservers + 1, "demo-autoscaler": 1}


def test_standby_pservers_are_further_pods_that_may_all_follow_a_pserver() -> None:
    job = replace(FULL, standby_pservers=2)
    (found,) = (
        each["spec"]
        for each in render(job)
        if each["metadata"]["name"] == "demo-pserver" and "replicas" in each.get("spec", {})
    )
    assert found["replicas"] == FULL.pservers + FULL.spares + 2
    assert pods(render(job))["pserver"]["spec"]["containers"][0]["args"] == ["pserver", "--standby"]
    assert pods(render(FULL))["pserver"]["spec"]["containers"][0]["args"] == ["pserver"]
    with pytest.raises(UsageError, match="standby pservers cannot be used with FLIGHTEDL_RECOVERY=rollback"):
        replace(job, variables={"FLIGHTEDL_RECOVERY": "rollback"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": "Demo"},
        {"job": "x" * 41},
        {"image": ""},
        {"pservers": 0},
        {"etcd_members": 2},
        {"insecure": True},
        {"trainers": -1},
        {"standby_pservers": -1},
    ],
    ids=str,
)
def test_wrong_values_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(FULL, **wrong)


@pytest.mark.parametrize("wrong", [{"cpu": "much"}, {"memory": "-1Gi"}, {"memory_limit": ""}], ids=str)
def test_wrong_quantities_are_rejected(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="quantity"):
        Resources(**wrong)


def test_torchrun_starts_the_ranks_of_a_group_in_one_pod() -> None:
    templates = pods(render(JOBS["group"]))
    assert templates.keys() == {"trainer", "etcd", "master"}
    (container,) = templates["trainer"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "torch.distributed.run"]
    assert container["args"] == ["--nproc-per-node=4", "--max-restarts=1000", "/code/train.py", "--fast"]
    module = replace(JOBS["group"], target="package.train")
    assert "--module" in pods(render(module))["trainer"]["spec"]["containers"][0]["args"]
    for more in ({"trainers": 2}, {"pservers": 1}, {"spares": 1}, {"standby_pservers": 1}, {"scaling": Scaling(1, 2)}):
        with pytest.raises(UsageError, match="leave out trainers and pservers"):
            replace(JOBS["group"], **more)
