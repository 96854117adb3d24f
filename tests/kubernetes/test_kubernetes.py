"""The manifests, the chart and the Dockerfile, by Kubernetes' schemas, Kubeflow's models and helm.

`make kubernetes` runs this file, in an environment of its own. No cluster is there.
"""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

reason = "this environment is another one; see `make kubernetes`"
helm: Any = pytest.importorskip("helm_python", reason=reason)
trainer: Any = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
kubernetes_validate: Any = pytest.importorskip("kubernetes_validate", reason=reason)

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
VERSIONS = "1.28", "1.37"  # the oldest of the chart, and the newest that is known
INFO = 1  # severity of helm's lint; it misses an icon
MODELS: dict[str, Any] = {
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
    "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime,
}


def read(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def rendered(**values: Any) -> str:
    with helm.Chart.load(FOLDER / "chart") as chart:
        (text,) = chart.render(values, name="images", namespace="default").values()
    return text


def check(document: dict[str, Any]) -> None:
    """Refuse a field that the resource does not have, or a value of another type."""
    if (model := MODELS.get(document["kind"])) is not None:
        assert model.from_dict(copy.deepcopy(document)).to_dict() == document, "a field is lost"
        if document["kind"] == "TrainingRuntime":
            for replicated in document["spec"]["template"]["spec"]["replicatedJobs"]:
                job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
                spec = copy.deepcopy(replicated["template"]["spec"])
                spec["template"]["spec"].setdefault("restartPolicy", "Never")  # as JobSet does
                check(job | {"spec": spec})
        return
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "one pod of CPUs": {
        "nodes": 1,
        "ranksPerNode": 2,
        "gpuResource": "",
        "modelClaim": "",
        "model": "tiny",
        "env": {},
        "options": ["--most-waiting=20", "--policy=quick"],
    },
    "everywhere": {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "spool": {"size": "1Ti", "storageClass": "fast"},
        "loadSeconds": 61,
    },
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_helm_renders_is_legal(values: dict[str, Any]) -> None:
    documents = read(rendered(**values))
    kinds = ["Service", "Service", "NetworkPolicy", "StatefulSet"]
    assert [document["kind"] for document in documents] == kinds
    for document in documents:
        check(document)
    spec = documents[-1]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    (claim,) = documents[-1]["spec"]["volumeClaimTemplates"]
    assert mounts == {volume["name"] for volume in spec["volumes"]} | {claim["metadata"]["name"]}
    assert container["args"][-len(values.get("options", [])) or 99 :] == values.get("options", [])
    assert spec["terminationGracePeriodSeconds"] > 5 + 120  # preStop, and the steps that run
    loads = 10 * container["livenessProbe"]["failureThreshold"]
    assert loads >= values.get("loadSeconds", 1800)
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus == (None if "gpuResource" in values else "8")
    for service, port in zip(documents[:2], ("http", "rendezvous"), strict=True):
        assert service["spec"]["ports"][0]["name"] == port
    labels = documents[-1]["spec"]["template"]["metadata"]["labels"]
    assert (
        documents[1]["spec"]["selector"]
        == labels
        == documents[-1]["spec"]["selector"]["matchLabels"]
    )


def test_the_manifest_beside_the_chart_is_what_helm_renders() -> None:
    text = (FOLDER / "serve.yaml").read_text()
    head, _, body = text.partition("---\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert body == rendered().lstrip("\n")


def test_helm_finds_nothing_and_the_schema_names_every_value() -> None:
    findings = helm.lint(FOLDER / "chart")
    assert not findings["errors"] and max(one["severity"] for one in findings["messages"]) <= INFO
    values = yaml.safe_load((FOLDER / "chart" / "values.yaml").read_text())
    schema = json.loads((FOLDER / "chart" / "values.schema.json").read_text())
    assert {*values, "global"} == {*schema["properties"]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodse": 2},
        {"nodes": "2"},
        {"nodes": 0},
        {"options": ["compile"]},
        {"port": 29500},
        {"spool": {"sizes": "1Gi"}},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError), helm.Chart.load(FOLDER / "chart") as chart:
        chart.validate_schema(wrong)


@pytest.mark.parametrize("name", ["train.yaml", "serve.yaml"])
def test_manifests_are_legal_and_a_misspelt_field_anywhere_is_refused(name: str) -> None:
    documents = read((FOLDER / name).read_text())
    kinds = {document["kind"] for document in documents}
    assert kinds >= ({"TrainJob", "TrainingRuntime"} if name == "train.yaml" else {"StatefulSet"})
    for document in documents:
        check(document)
        tried = 0
        for wrong in misspelt(document):
            tried += 1
            with pytest.raises((AssertionError, kubernetes_validate.ValidationError, ValueError)):
                check(wrong)
        assert tried >= 3


FREE = re.compile(r"(labels|annotations|matchLabels|selector|limits|requests|nodeSelector)$")


def misspelt(document: Any) -> Iterator[Any]:
    """Copies of a document, each with one field below `spec` renamed; not the keys of users."""

    def paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        is_own = bool(path) and isinstance(path[-1], str) and FREE.search(path[-1]) is not None
        if isinstance(value, dict) and (not is_own or "matchLabels" in value):
            for key, inner in value.items():
                yield (*path, key)
                yield from paths(inner, (*path, key))
        if isinstance(value, list):
            for place, inner in enumerate(value):
                yield from paths(inner, (*path, place))

    for *path, key in paths(document["spec"], ()):
        wrong = copy.deepcopy(document)
        inside = wrong["spec"]
        for step in path:
            inside = inside[step]
        inside[f"{key}x"] = inside.pop(key)
        yield wrong


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = (hadolint, "--failure-threshold", "style", FOLDER / "Dockerfile")
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    text = (FOLDER / "Dockerfile").read_text().replace("--no-cache-dir ", "")
    wrong = subprocess.run((hadolint, "-"), input=text, capture_output=True, text=True)
    assert wrong.returncode != 0 and "DL3042" in wrong.stdout


def test_the_image_has_what_it_copies_and_does_not_run_as_root() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text()
    root = FOLDER.parents[1]
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (root / name).exists() and f"!{name}\n" in ignored, name
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert (FOLDER / "healthy.py").is_file() and "examples/kubernetes/healthy.py" in text
