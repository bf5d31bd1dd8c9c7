"""Command lines of submitted jobs, and commands that manage jobs of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner

from flightedl.adapters.clock import SystemClock
from flightedl.errors import NotFoundError, UsageError
from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.submitting import cancel
from flightedl.launch.kubernetes.submitting import submit as submit_objects
from flightedl.launch.kubernetes.values import ClusterJob
from flightedl.launch.kubernetes.views import labels_of
from flightedl.launch.progress import Figures
from flightedl.messages.scaling import ScaleReply
from flightedl_tools import clusters, scaling
from flightedl_tools import submit as submit_module
from flightedl_tools.submit import code_of, count_of, submit, variable_of
from tests.support.clock import FakeClock
from tests.support.memory_cluster import MemoryCluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    """In-memory cluster on which the commands act."""
    found = MemoryCluster()
    monkeypatch.setattr(clusters, "Kubectl", lambda *_: found)
    return found


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_train.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    return tmp_path / "my_train.py"


def run(command: click.Command, *arguments: str) -> Any:
    return CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)


def test_a_dry_run_prints_the_objects_without_secrets(script: Path) -> None:
    result = run(
        submit,
        "my_train.py",
        *("--image=demo:1", "--trainers=2..20", "--pservers=4", "--checkpoint=s3://bucket", "--with=helper.py"),
        *("--set=AWS_REGION=eu", "--dry-run", "s3://data", "--epochs=3"),
    )
    objects = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(result.output)}
    assert objects["ConfigMap", "my-train-code"]["data"] == {"my_train.py": "import helper\n", "helper.py": "x = 1\n"}
    settings = objects["ConfigMap", "my-train"]["data"]
    assert settings["FLIGHTEDL_PSERVERS"] == "4"
    assert (settings["FLIGHTEDL_CHECKPOINT"], settings["AWS_REGION"]) == ("s3://bucket", "eu")
    (trainer,) = objects["Job", "my-train-trainer"]["spec"]["template"]["spec"]["containers"]
    assert trainer["args"] == ["/code/my_train.py", "s3://data", "--epochs=3"]
    (loop,) = objects["Deployment", "my-train-autoscaler"]["spec"]["template"]["spec"]["containers"]
    assert loop["args"] == ["autoscale", "--min=2", "--max=20", "--worth=0.5"]
    assert not any(kind == "Secret" for kind, _ in objects)
    assert "Secrets my-train-server, my-train-trainer, my-train-reader, my-train-etcd:\n" in result.output
    assert "certs create certs --job my-train --host my-train-etcd --host my-train-etcd-0.my-train" in result.output


def test_the_output_of_a_dry_run_can_be_applied(script: Path) -> None:
    """The collector would delete objects whose owner does not exist."""
    clock = FakeClock(jumps=True)
    cluster = MemoryCluster(clock, collection_s=4.0)
    result = run(submit, "my_train.py", "--image=demo:1", "--trainers=1..3", "--dry-run")
    objects = [each for each in yaml.safe_load_all(result.output) if each]
    cluster.apply(objects)
    clock.sleep(5.0)
    assert {(each["kind"], each["metadata"]["name"]) for each in objects} == set(cluster.objects)
    assert objects[-1]["kind"] == "Job", "pods of the Job need the other objects"
    cancel(cluster, "my-train", clock, at_once=True)
    assert cluster.objects == {}


def test_options_before_the_script_belong_to_submit_or_are_rejected(script: Path) -> None:
    for word in ("--trainer-gpu", "--trainer-gpu=1"):
        with pytest.raises(click.NoSuchOption, match="No such option '--trainer-gpu'"):
            run(submit, "--image=demo:1", word, "my_train.py", "--dry-run")
    with pytest.raises(UsageError, match="would be lost with each pod"):
        run(submit, "--image=demo:1", "--checkpoint=/tmp/x", "my_train.py", "--dry-run")
    for words in (["--checkpoint-every-s", "5"], ["--lease-ttl-s=5"], ["--page"]):
        with pytest.raises(UsageError, match=f"{words[0].partition('=')[0]} is an option of `flightedl run`, not of"):
            run(submit, "--image=demo:1", "--dry-run", "my_train.py", *words)
        assert words[0] in run(submit, "--image=demo:1", "--dry-run", "my_train.py", "--", *words).output


@pytest.mark.parametrize(
    ("words", "variable", "arguments"),
    [
        (["my_train.py", "--resume"], "true", []),
        (["--resume", "my_train.py", "--lr=1"], "true", ["--lr=1"]),
        (["--resume=auto", "my_train.py"], "auto", []),
        (["my_train.py", "--", "--resume=auto", "--trainers", "3"], None, ["--resume=auto", "--trainers", "3"]),
    ],
)
def test_a_job_resumes_from_its_checkpoints_on_request(
    script: Path, words: list[str], variable: str | None, arguments: list[str]
) -> None:
    output = run(submit, "--image=demo:1", "--checkpoint=s3://b/c", "--dry-run", *words).output
    objects = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(output) if each}
    assert objects["ConfigMap", "my-train"]["data"].get("FLIGHTEDL_RESUME") == variable
    (trainer,) = objects["Job", "my-train-trainer"]["spec"]["template"]["spec"]["containers"]
    assert trainer["args"][1:] == arguments
    with pytest.raises(UsageError, match="needs the URL"):
        run(submit, "--image=demo:1", "--dry-run", "my_train.py", "--resume")


def test_options_and_templates_set_the_requirements_of_pods(script: Path, tmp_path: Path) -> None:
    (tmp_path / "gpu.yaml").write_text("spec: {nodeSelector: {gpu: h200}, runtimeClassName: nvidia}\n")
    result = run(
        submit,
        *("--image=demo:1", "--trainers=1..2", "--dry-run", "--trainer-gpus=2", "--trainer-cpu-limit=8"),
        *("--node-selector=zone=a", "--toleration=gpu:NoSchedule", "--toleration=team=x", "--volume=models:/models"),
        *("--volume=data:/data:ro", "--image-pull-secret=registry", "--image-pull-policy=Always"),
        *("--service-account=reader", "--annotation=a/b=c=d", "--priority-class=high", "--checkpoint=/models/demo"),
        *("--backoff-limit=3", "--deadline-s=3600", "--pod-template=trainer=gpu.yaml", "my_train.py"),
    )
    objects = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(result.output) if each}
    pods = {name: each["spec"]["template"] for (_, name), each in objects.items() if "template" in each.get("spec", {})}
    assert len(pods) == 5
    for name, pod in pods.items():
        (container,) = pod["spec"]["containers"]
        assert pod["metadata"]["annotations"] == {"a/b": "c=d"}
        assert pod["spec"]["nodeSelector"] == {"zone": "a"} | ({"gpu": "h200"} if "trainer" in name else {})
        assert pod["spec"]["tolerations"] == [
            {"key": "gpu", "effect": "NoSchedule", "operator": "Exists"},
            {"key": "team", "value": "x", "operator": "Equal"},
        ]
        assert (pod["spec"]["priorityClassName"], container["imagePullPolicy"]) == ("high", "Always")
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["spec"]["serviceAccountName"] == (name if "autoscaler" in name else "reader")
        claims = {
            each["persistentVolumeClaim"]["claimName"]: each["name"]
            for each in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in each
        }
        mounted = {each["name"]: (each["mountPath"], each.get("readOnly")) for each in container["volumeMounts"]}
        if "etcd" in name or "autoscaler" in name:
            assert claims == {}
        else:
            assert {claim: mounted[name] for claim, name in claims.items()} == {
                "models": ("/models", False),
                "data": ("/data", True),
            }
    job = objects["Job", "my-train-trainer"]["spec"]
    assert (job["backoffLimit"], job["activeDeadlineSeconds"]) == (3, 3600)
    assert job["template"]["spec"]["runtimeClassName"] == "nvidia"
    assert job["template"]["spec"]["containers"][0]["resources"]["limits"] == {
        "memory": "4Gi",
        "cpu": "8",
        "nvidia.com/gpu": "2",
    }


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--node-selector=gpu", "'gpu' is not KEY=VALUE"),
        ("--toleration=a:Sometimes", "'a:Sometimes' is not KEY"),
        ("--volume=models", "'models' is not CLAIM:PATH"),
        ("--volume=models:data", "'models:data' is not CLAIM:PATH"),
        ("--pod-template=absent.yaml", "--pod-template absent.yaml: cannot read absent.yaml"),
        ("--pod-template=wrong.yaml", "--pod-template wrong.yaml: cannot read wrong.yaml"),
        ("--pod-template=helper.py", "--pod-template helper.py: a pod template has metadata and spec"),
        ("--pod-template=nobody=helper.py", "'nobody' is not a role of a pod: choose one of trainer, master"),
        ("--checkpoint=/data/x", "would be lost with each pod"),
        ("--trainer-cpu-limit=all", "cpu_limit is 'all'"),
        ("--backoff-limit=-1", "backoff_limit is -1"),
    ],
)
def test_wrong_options_for_pods_are_rejected(script: Path, tmp_path: Path, option: str, text: str) -> None:
    (tmp_path / "wrong.yaml").write_text("spec: [")
    with pytest.raises(UsageError, match=text):
        run(submit, "--image=demo:1", "--dry-run", "--volume=data:/data:ro", option, "my_train.py")


def test_a_job_with_certificates_is_submitted_listed_scaled_and_cancelled(cluster: MemoryCluster, script: Path) -> None:
    assert "is submitted" in run(submit, "my_train.py", "--image=demo:1", "--detach").output
    assert ("Secret", "my-train-server") in cluster.objects
    assert "my-train  starting  0/2" in run(clusters.jobs).output
    assert "is being scaled to 8 trainers" in run(scaling.scale, "trainers", "8").output
    assert cluster.objects["Job", "my-train-trainer"]["spec"]["parallelism"] == 8
    run(clusters.cancel, "my-train")
    assert cluster.objects == {}
    assert "has no jobs" in run(clusters.jobs).output


def test_pservers_of_a_submitted_job_are_scaled(cluster: MemoryCluster) -> None:
    job = ClusterJob(job="demo", image="demo:1", target="train.py", tls=False, insecure=True)
    submit_objects(cluster, render(job), SystemClock())
    metadata = {"name": "demo-master-a", "labels": labels_of("demo", "master")}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    cluster.apply([{"kind": "Pod", "metadata": metadata, "status": ready}])
    cluster.answers["demo-master-a"] = msgspec.json.encode(ScaleReply(wanted=2, pservers=2)).decode()
    assert run(scaling.scale, "pservers", "2").output == "the job has 2 pservers\n"
    assert run(scaling.scale, "pservers", "--job", "demo").output == "the job has 2 pservers\n"
    with pytest.raises(UsageError, match="omit --no-wait"):
        run(scaling.scale, "pservers", "3", "--no-wait")
    with pytest.raises(NotFoundError, match="no job other"):
        run(scaling.scale, "pservers", "3", "--job", "other", "--namespace", "training")


def test_the_output_of_a_jobs_pods_is_printed(cluster: MemoryCluster) -> None:
    job = ClusterJob(job="demo", image="demo:1", target="train.py", tls=False, insecure=True)
    submit_objects(cluster, render(job), SystemClock())
    pod = {"kind": "Pod", "metadata": {"name": "demo-trainer-a", "labels": labels_of("demo", "trainer")}}
    cluster.apply([pod | {"status": {"phase": "Running"}}])
    cluster.output["demo-trainer-a"] = ["loss=1", "loss=0.5"]
    assert run(clusters.logs, "demo").output == "demo-trainer-a | loss=1\ndemo-trainer-a | loss=0.5\n"


def test_one_of_several_jobs_must_be_named(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        job = ClusterJob(job=name, image="demo:1", target="train.py", tls=False, insecure=True)
        submit_objects(cluster, render(job), SystemClock())
    with pytest.raises(UsageError, match="--job"):
        clusters.only_job(cluster)
    monkeypatch.setenv("FLIGHTEDL_JOB", "two")
    assert clusters.only_job(cluster) == "two"


@pytest.mark.parametrize(("text", "found"), [("4", (4, None)), ("0", (0, None)), ("2..20", (2, 20))])
def test_counts_are_numbers_or_ranges(text: str, found: tuple[int, int | None]) -> None:
    assert count_of(text) == found


@pytest.mark.parametrize("text", ["", "many", "20..2", "2..", "-1"])
def test_wrong_counts_raise_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="must be a number"):
        count_of(text)


def test_wrong_variables_and_files_are_rejected(script: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        variable_of("novalue")
    with pytest.raises(UsageError, match="NAME=VALUE"):
        variable_of("a-b=c")
    with pytest.raises(UsageError, match="FLIGHTEDL_NOPE: unknown setting"):
        variable_of("FLIGHTEDL_NOPE=1")
    assert variable_of("FLIGHTEDL_CHECKPOINT_EVERY_S=10") == ("FLIGHTEDL_CHECKPOINT_EVERY_S", "10")
    with pytest.raises(UsageError, match="needs a local script"):
        code_of("package.module", [script])
    for target in ("absent.py", "/app/absent.py", "package.module"):
        with pytest.raises(UsageError, match=f"no such file: {target}; .* --in-image"):
            code_of(target, [])
        assert code_of(target, [], in_image=True) == {}
    assert code_of("flightedl.examples.ledger", []) == {}
    (tmp_path / "a b.txt").write_text("x")
    with pytest.raises(UsageError, match=r"'a b\.txt': use only letters"):
        code_of(str(script), [tmp_path / "a b.txt"])
    with pytest.raises(UsageError, match="two files have this name"):
        code_of(str(script), [tmp_path / "helper.py", tmp_path / "helper.py"])
    with pytest.raises(UsageError, match="cannot send"):
        code_of(str(script), [tmp_path / "absent.py"])
    (tmp_path / "large.txt").write_text("x" * 1_000_000)
    with pytest.raises(UsageError, match="put them into the image"):
        code_of(str(script), [tmp_path / "large.txt"])


class Shown:
    """A display that records its input."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.figures: list[Figures] = []

    def lines(self, name: str, texts: Sequence[str]) -> None:
        self.printed += [f"{name} | {text}" for text in texts]

    def event(self, text: str) -> None:
        self.printed.append(text)

    def update(self, figures: Figures) -> None:
        self.figures.append(figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_job_is_followed_to_its_end(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command shows the job's output, the reasons why pods wait, and the verdict."""
    job = ClusterJob(job="demo", image="demo:1", target="train.py", tls=False, insecure=True)
    submit_objects(cluster, render(job), SystemClock())
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    metadata = {"name": "demo-trainer-a", "labels": labels_of("demo", "trainer")}
    cluster.apply([{"kind": "Pod", "metadata": metadata, "status": {"phase": "Pending", "conditions": [unscheduled]}}])
    cluster.output["demo-trainer-a"] = ["loss=1"]

    class Ending(FakeClock):
        """Clock whose advance lets the job progress."""

        def sleep(self, seconds: float) -> None:
            self.advance(seconds)
            pod = {"status": {"phase": "Succeeded", "conditions": []}}
            cluster.patch("Pod", "demo-trainer-a", pod)
            over = {"type": "Complete", "status": "True"}
            cluster.patch("Job", "demo-trainer", {"status": {"conditions": [over]}})

    monkeypatch.setattr(submit_module, "SystemClock", Ending)
    shown = Shown()
    assert submit_module.watch(cluster, job, shown) == 0
    assert shown.printed[1:] == [
        "trainer cannot start: 0/3 nodes are available",
        "demo-trainer-a | loss=1",
        "job demo is done",
    ]
    assert [(each.trainers, each.pservers) for each in shown.figures] == [(2, 2)]
