"""The Kubernetes manifest agrees with the workers, ports and launch-script flags that it names."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from router.config.sources import load

ROOT: Final = Path(__file__).parents[2]
MANIFEST: Final = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/d2lpm.yaml").read_text("utf-8")))


def named(kind: str, name: str) -> dict[str, Any]:
    """Return the manifest's object of this kind and name."""
    (found,) = [one for one in MANIFEST if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return dict(found)


def container(kind: str, name: str) -> dict[str, Any]:
    """Return the only container of its pods."""
    (found,) = named(kind, name)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_router_knows_every_worker(tmp_path: Path) -> None:
    """The router's settings are valid, and list each pod of the StatefulSet by the name that the headless service gives
    it.
    """
    config = tmp_path / "router.yaml"
    config.write_text(named("ConfigMap", "d2lpm")["data"]["router.yaml"])
    settings = load({"--config": str(config)}, {})
    workers = named("StatefulSet", "vllm")["spec"]
    service = named("Service", workers["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    port = service["spec"]["ports"][0]["port"]
    assert [(worker.id, worker.url) for worker in settings.worker] == [
        (f"vllm-{pod}", f"http://vllm-{pod}.vllm:{port}") for pod in range(workers["replicas"])
    ]
    grace = named("Deployment", "d2lpm")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.drain_timeout


def test_the_router_is_confined_and_has_one_replica() -> None:
    """The router is not root, writes only its state, for which a volume is mounted, and never runs twice: two share no
    state.
    """
    deployment, router = named("Deployment", "d2lpm")["spec"], container("Deployment", "d2lpm")
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    pod = deployment["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["enableServiceLinks"] is False  # the variables for the Services named d2lpm are no settings
    limits = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert router["securityContext"] == limits
    mounts = {mount["name"]: mount["mountPath"] for mount in router["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    settings = yaml.safe_load(named("ConfigMap", "d2lpm")["data"]["router.yaml"])
    assert settings["state"] == mounts["state"]
    assert router["args"] == ["serve", "--config", f"{mounts['config']}/router.yaml"]


def test_the_images_are_those_of_the_compose_file() -> None:
    """Manifest and compose file use the same version of each image."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
    assert container("Deployment", "d2lpm")["image"] == services["router"]["image"]
    assert container("StatefulSet", "vllm")["image"] == services["vllm-1"]["image"]


def test_a_worker_has_the_flags_of_the_launch_script(tmp_path: Path) -> None:
    """The manifest starts vLLM with the arguments that the launch script would use."""
    worker = container("StatefulSet", "vllm")
    (tmp_path / "vllm").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "vllm").chmod(0o755)
    command = ["sh", str(ROOT / "workers/launch/vllm.sh"), worker["args"][1], *worker["args"][-4:]]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert worker["command"] == ["vllm"]
    assert worker["args"] == done.stdout.splitlines()


@pytest.mark.parametrize(
    ("kind", "services"),
    [("Deployment", ("d2lpm", "d2lpm-admin")), ("StatefulSet", ("vllm",))],
    ids=["router", "worker"],
)
def test_labels_and_ports_match(kind: str, services: Sequence[str]) -> None:
    """Services select their pods, and have each port that these open once: operators' in a Service of its own."""
    spec = named(kind, services[0])["spec"]
    labels = spec["template"]["metadata"]["labels"]
    served = [named("Service", name)["spec"] for name in services]
    assert all(spec["selector"]["matchLabels"] == labels == service["selector"] for service in served)
    opened = [(port["name"], port["containerPort"]) for port in container(kind, services[0])["ports"]]
    assert [(port["name"], port["port"]) for service in served for port in service["ports"]] == opened
