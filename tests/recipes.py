"""Pods of the recipes in examples/cluster, as each kind's controller creates them."""

import copy
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "examples" / "cluster"


def documents(name):
    """The resources of a recipe by kind."""
    return {part["kind"]: part for part in yaml.safe_load_all((CLUSTER / name).read_text())}


def indexed_job(name):
    """The Job that runs the workers of a recipe.

    Returns:
        The Job as a dict; the host names of its pods, with {} for the index; their subdomain.
    """
    parts = documents(name)
    if "Job" in parts:
        job = parts["Job"]
        return job, job["metadata"]["name"] + "-{}", job["spec"]["template"]["spec"]["subdomain"]
    if "TrainJob" in parts:
        owner, jobs = _trainer(parts)
    else:
        owner, jobs = parts["JobSet"]["metadata"]["name"], parts["JobSet"]["spec"]
    (replicated,) = jobs["replicatedJobs"]
    assert replicated.get("replicas", 1) == 1
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{owner}-{replicated['name']}-0"},
        "spec": replicated["template"]["spec"],
    }
    return job, f"{owner}-{replicated['name']}-0-{{}}", jobs["network"].get("subdomain", owner)


def _trainer(parts):
    """Name and spec of the JobSet that Kubeflow Trainer creates from a TrainJob and its runtime."""
    job, runtime = parts["TrainJob"], parts["TrainingRuntime"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    for replicated in spec["replicatedJobs"]:
        labels = replicated["template"]["metadata"]["labels"]
        if labels["trainer.kubeflow.org/trainjob-ancestor-step"] != "trainer":
            continue
        inside = replicated["template"]["spec"]
        inside["completions"] = inside["parallelism"] = job["spec"]["trainer"]["numNodes"]
        for container in inside["template"]["spec"]["containers"]:
            if container["name"] == "node":
                container["command"] = job["spec"]["trainer"]["command"]
    return job["metadata"]["name"], spec
