"""Renders the chart with the real helm, and the kustomize base with the real kubectl."""

import itertools
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

import yaml

from .environment import ROOT, program, validator

CHART: Final = ROOT / "deploy" / "helm"
KUBERNETES: Final = "1.34"
CUSTOM: Final = frozenset({"ServiceMonitor", "ScrapeConfig", "PrometheusRule", "ScaledObject"})
"""Kinds of other projects, for which Kubernetes has no schema."""
Objects = list[dict[str, Any]]
Values = dict[str, Any]

VLLM: Final[Values] = {"engine": "vllm", "model": "Qwen/Qwen3-8B", "replicas": 2}
SGLANG: Final[Values] = {"engine": "sglang", "model": "Qwen/Qwen3-4B", "args": ["--tp-size", "2"], "gpus": 2}
PREFILL: Final[Values] = {**VLLM, "role": "prefill", "env": [{"name": "A", "value": "b"}], "secretEnv": "hf"}
DECODE: Final[Values] = {**VLLM, "role": "decode", "tolerations": [{"key": "gpu", "operator": "Exists"}]}
KEY: Final = "0123456789abcdef"
CHOICES: Final[Mapping[str, Mapping[str, Values]]] = {
    "workers": {
        "none": {"config": {"worker": ["http://10.0.0.7:8000"]}, "discovery": {"enabled": False}},
        "found": {"discovery": {"selectors": ["app=vllm"], "namespace": "engines"}},
        "vllm": {"workers": {"vllm": VLLM}},
        "sglang": {"workers": {"sglang": SGLANG}},
        "apart": {"workers": {"prefill": PREFILL, "decode": DECODE}},
        "mixed": {"workers": {"vllm": VLLM, "sglang": SGLANG}},
    },
    "autoscaling": {"none": {}, "hpa": {"kind": "hpa"}, "keda": {"kind": "keda", "maxReplicas": 9}},
    "monitoring": {
        "off": {},
        "on": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True},
        },
    },
    "keys": {
        "none": {},
        "given": {
            "adminKey": {"value": KEY},
            "workerApiKey": {"value": "of-workers"},
            "clients": {"value": 'clients:\n  ann: {key: "sha256:' + "a" * 64 + '"}\n'},
        },
        "existing": {
            "adminKey": {"existingSecret": "keys"},
            "workerApiKey": {"existingSecret": "keys"},
            "clients": {"existingSecret": "clients"},
        },
    },
    "tls": {"off": {}, "on": {"tls": {"existingSecret": "certificate"}}},
    "state": {"on": {}, "off": {"state": {"enabled": False}}},
    "cluster": {
        "off": {},
        "on": {"cluster": {"enabled": True, "url": "valkey://store:6379/llm", "existingSecret": "cluster"}},
        "by a Lease": {
            "cluster": {
                "enabled": True,
                "lease": "kubernetes",
                "url": "valkey://store:6379/llm",
                "existingSecret": "cluster",
                "tls": {"existingSecret": "replicas"},
            }
        },
    },
    "policies": {
        "off": {},
        "on": {
            "networkPolicy": {"enabled": True},
            "podDisruptionBudget": {"enabled": True},
            "nodeSelector": {"pool": "cpu"},
            "podAnnotations": {"a": "b"},
            "extraEnv": [{"name": "D2LPM_LOG_LEVEL", "value": "warning"}],
        },
    },
}
"""Values by topic; a combination takes one of each."""


def combinations() -> Iterable[tuple[str, Values]]:
    """Yield every combination of the choices, by its name."""
    for chosen in itertools.product(*(choices.items() for choices in CHOICES.values())):
        values: Values = {}
        scaling: Values = {}
        for topic, (_, given) in zip(CHOICES, chosen, strict=True):
            if topic == "autoscaling":
                scaling = given
            else:
                values |= given
        if scaling:
            groups = {name: {**group, "autoscaling": scaling} for name, group in values.get("workers", {}).items()}
            values = {**values, "workers": groups}
        yield ", ".join(f"{topic}: {name}" for topic, (name, _) in zip(CHOICES, chosen, strict=True)), values


def pairwise() -> Iterable[tuple[str, Values]]:
    """Yield fewer combinations, in which every two choices of different topics are together at least once."""
    seen: set[frozenset[str]] = set()
    shuffled = list(combinations())
    Random(0).shuffle(shuffled)
    for name, values in shuffled:
        pairs = {frozenset(pair) for pair in itertools.combinations(name.split(", "), 2)}
        if not pairs <= seen:
            seen |= pairs
            yield name, values


def render(folder: Path, values: Values) -> Objects:
    """Return the objects of the chart with these values. Raises CalledProcessError with helm's message on stderr."""
    file = folder / "values.json"
    file.write_text(json.dumps(values), "utf-8")
    command = [str(program("helm")), "template", "d2lpm", str(CHART), "--namespace", "llm", "--values", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def kustomized(folder: Path) -> Objects:
    """Return the objects of a kustomization."""
    command = [str(program("kubectl")), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(done.stdout))


def mistakes(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return what strict validation finds wrong with these objects: empty if nothing."""
    lines = "".join(json.dumps(each) + "\n" for each in objects)
    command = [str(validator()), str(Path(__file__).parent / "validate.py"), KUBERNETES]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300, check=False).stdout


def of_kind(objects: Objects, kind: str, name: str | None = None) -> dict[str, Any]:
    """Return the only object of this kind, and of this name if one is given."""
    (found,) = [one for one in objects if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    return found
