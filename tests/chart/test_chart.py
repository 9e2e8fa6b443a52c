"""The chart renders valid objects, whatever the values, and refuses values that make no sense."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from router.config.sources import load
from tests.support.dockerfile import ROOT

from .environment import program
from .rendering import (
    CHART,
    CHOICES,
    CUSTOM,
    DECODE,
    KEY,
    PREFILL,
    SGLANG,
    VLLM,
    Objects,
    combinations,
    kustomized,
    mistakes,
    of_kind,
    pairwise,
    render,
)

NAME: Final = "d2lpm-d2lpm-router"
RULES: Final = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text("utf-8"))


def test_helm_finds_no_fault(tmp_path: Path) -> None:
    """Helm's linter accepts the chart as it is, and with every choice switched on."""
    everything = {topic: list(choices.values())[-1] for topic, choices in CHOICES.items() if topic != "autoscaling"}
    merged = {name: value for given in everything.values() for name, value in given.items()}
    (tmp_path / "values.json").write_text(json.dumps(merged))
    for flags in ([], ["--values", str(tmp_path / "values.json")]):
        command = [str(program("helm")), "lint", "--strict", str(CHART), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout


def test_every_combination_is_valid(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Each object of each combination of values is valid, strictly, and its router accepts its configuration.

    Without `--all`, these are only as many as have every two values together.
    """
    chosen = combinations() if pytestconfig.getoption("--all") else pairwise()
    found: dict[str, dict[str, Any]] = {}
    configurations: dict[str, str] = {}

    def rendered(numbered: tuple[int, tuple[str, dict[str, Any]]]) -> tuple[str, Objects]:
        number, (name, values) = numbered
        folder = tmp_path / str(number)
        folder.mkdir()
        return name, render(folder, values)

    with ThreadPoolExecutor(2) as pool:
        for name, objects in pool.map(rendered, enumerate(chosen)):
            names = [(each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")) for each in objects]
            assert len(set(names)) == len(names), name
            configurations.setdefault(of_kind(objects, "ConfigMap", NAME)["data"]["router.yaml"], name)
            found |= {json.dumps(each, sort_keys=True): each for each in objects if each["kind"] not in CUSTOM}
    assert mistakes(found.values()) == ""
    for text, name in configurations.items():
        (tmp_path / "router.yaml").write_text(text)
        assert load({"--config": str(tmp_path / "router.yaml")}, {}).admin_port == 9000, name


def test_a_wrong_object_would_be_found(tmp_path: Path) -> None:
    """Strict validation refuses a field that does not exist, and one of another type."""
    for change in ({"replicaz": 1}, {"replicas": "one"}):
        deployment = of_kind(render(tmp_path, {}), "Deployment")
        deployment["spec"] |= change
        assert "ValidationError" in mistakes([deployment])


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"a": {"model": "m"}}, "workers.a.engine is missing"),
        ({"a": {"engine": "vllm"}}, "workers.a.model is missing"),
        ({"a": {"engine": "tgi", "model": "m"}}, "vllm or sglang, not tgi"),
        ({"a": {**SGLANG, "role": "prefill"}}, "only vLLM hands prompts over"),
        ({"router": VLLM}, "workers.router: this name is taken"),
        ({"a": {**VLLM, "role": "cook"}}, "both, prefill or decode, not cook"),
        ({"a": {**VLLM, "autoscaling": {"kind": "vpa"}}}, "hpa or keda, not vpa"),
    ],
)
def test_values_that_make_no_sense_are_refused(workers: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The error names the value and what it may be."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(tmp_path, {"workers": workers})
    assert message in refused.value.stderr


def test_nothing_is_a_value_too(tmp_path: Path) -> None:
    """Workers may have no GPU, no replica, and be scaled to none; what is not said has its default."""
    nothing: dict[str, Any] = {**VLLM, "gpus": 0, "replicas": 0}
    scaled: dict[str, Any] = {**nothing, "autoscaling": {"kind": "keda", "minReplicas": 0}}
    usual = {"engine": "vllm", "model": "m", "gpus": None, "replicas": None}
    for given, gpus, replicas in ((nothing, {}, 0), (scaled, {}, None), (usual, {"nvidia.com/gpu": "1"}, 1)):
        objects = render(tmp_path, {"workers": {"a": given}})
        spec = of_kind(objects, "StatefulSet")["spec"]
        assert spec.get("replicas") == replicas
        assert spec["template"]["spec"]["containers"][0]["resources"].get("limits", {}) == gpus
    assert of_kind(render(tmp_path, {"workers": {"a": scaled}}), "ScaledObject")["spec"]["minReplicaCount"] == 0


def test_the_router_finds_the_workers_of_its_release(tmp_path: Path) -> None:
    """Its selector matches the labels of each headless Service, whose label also says the role; it may read them."""
    objects = render(tmp_path, {"workers": {"prefill": PREFILL, "decode": DECODE}})
    settings = yaml.safe_load(of_kind(objects, "ConfigMap")["data"]["router.yaml"])
    services = {one["metadata"]["name"]: one for one in objects if one["kind"] == "Service"}
    ((label, value),) = [selector.split("=") for selector in settings["worker_kubernetes"]]
    for role in ("prefill", "decode"):
        service = services[f"{NAME}-{role}"]
        assert (service["metadata"]["labels"][label], service["metadata"]["labels"]["d2lpm-role"]) == (value, role)
        assert service["spec"]["clusterIP"] == "None"
        pod = of_kind(objects, "StatefulSet", f"{NAME}-{role}")["spec"]["template"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert "--kv-transfer-config" in pod["spec"]["containers"][0]["args"]
    assert label not in services[NAME]["metadata"]["labels"]
    rules = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]
    assert of_kind(objects, "Role")["rules"] == rules
    assert (
        of_kind(objects, "RoleBinding")["subjects"][0]["name"] == of_kind(objects, "ServiceAccount")["metadata"]["name"]
    )


@pytest.mark.parametrize(("values", "script"), [(VLLM, "vllm.sh"), (SGLANG, "sglang.sh")], ids=["vllm", "sglang"])
def test_workers_have_the_flags_of_the_launch_scripts(values: dict[str, Any], script: str, tmp_path: Path) -> None:
    """An engine is started with the words that its launch script would use, in any order."""
    for name in ("vllm", "python3"):
        (tmp_path / name).write_text('#!/bin/sh\nprintf \'%s\\n\' "$0" "$@"\n')
        (tmp_path / name).chmod(0o755)
    more = ["--host", "0.0.0.0", "--port", "8000", *values.get("args", [])]
    command = ["sh", str(ROOT / "workers/launch" / script), values["model"], *more]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    first, *words = done.stdout.splitlines()
    engine = of_kind(render(tmp_path, {"workers": {"a": values}}), "StatefulSet")["spec"]["template"]["spec"]
    container = engine["containers"][0]
    given = [*container["command"][1:], *container["args"]]
    assert container["command"][0] == Path(first).name
    assert sorted(_unspaced(given)) == sorted(_unspaced(words))


def _unspaced(words: list[str]) -> list[str]:
    """Return the words, JSON among them without spaces."""
    return [json.dumps(json.loads(word), sort_keys=True) if word.startswith("{") else word for word in words]


def test_prometheus_gets_the_rules_and_scrapes_the_port_for_operators(tmp_path: Path) -> None:
    """The rules are those of deploy/prometheus; the job has the name that they read, and one Service has its labels."""
    objects = render(tmp_path, dict(CHOICES["monitoring"]["on"]))
    assert of_kind(objects, "PrometheusRule")["spec"] == RULES
    monitor = of_kind(objects, "ServiceMonitor")["spec"]
    assert monitor["endpoints"][0]["relabelings"] == [{"targetLabel": "job", "replacement": "d2lpm"}]
    labels = monitor["selector"]["matchLabels"].items()
    (service,) = [one for one in objects if one["kind"] == "Service" and labels <= one["metadata"]["labels"].items()]
    assert [port["name"] for port in service["spec"]["ports"]] == [monitor["endpoints"][0]["port"]]
    dashboard = of_kind(objects, "ConfigMap", f"{NAME}-dashboard")["data"]["d2lpm.json"]
    assert json.loads(dashboard) == json.loads((ROOT / "deploy/grafana/dashboards/d2lpm.json").read_text("utf-8"))


def test_workers_are_scaled_by_what_waits_in_the_router(tmp_path: Path) -> None:
    """KEDA adds replicas for waiting requests of the model, and for the time that they wait; both metrics exist."""
    scaled = {**VLLM, "autoscaling": {"kind": "keda", "queuedPerReplica": 3}}
    objects = render(tmp_path, {"workers": {"a": scaled}})
    queued, waited = (trigger["metadata"] for trigger in of_kind(objects, "ScaledObject")["spec"]["triggers"])
    assert 'd2lpm_model_queued_requests{model="Qwen/Qwen3-8B"}' in queued["query"]
    assert 'd2lpm_queue_seconds_bucket{model="Qwen/Qwen3-8B"}' in waited["query"]
    assert queued["threshold"] == "3"
    assert "replicas" not in of_kind(objects, "StatefulSet")["spec"], "helm would undo what was scaled"


def test_an_hpa_scales_by_the_metric_that_is_named(tmp_path: Path) -> None:
    """By default that counts the requests for all models; an adapter may serve one for the model."""
    own = {"name": "queued", "selector": {"matchLabels": {"group": "a"}}}
    for metric, expected in ((None, {"name": "d2lpm_client_queued_requests"}), (own, own)):
        scaled = {**VLLM, "autoscaling": {"kind": "hpa", "metric": metric}}
        objects = render(tmp_path, {"workers": {"a": scaled}})
        assert of_kind(objects, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["external"]["metric"] == expected
        assert mistakes(objects) == ""


def test_probes_and_services_follow_the_settings(tmp_path: Path) -> None:
    """Ports and certificates that `config` sets are those of the container, and so of its probes and Services."""
    monitored: dict[str, Any] = {"serviceMonitor": {"enabled": True}}
    config = {"port": 8443, "admin_port": 9443, "tls_cert": "/certificates/a", "tls_key": "/certificates/b"}
    for given, ports, scheme in (({}, [8000, 9000], "HTTP"), (config, [8443, 9443], "HTTPS")):
        objects = render(tmp_path, {**monitored, "config": given})
        container = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
        assert [one["containerPort"] for one in container["ports"]] == ports
        probes = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
        assert [(probe["port"], probe["scheme"]) for probe in probes] == [("http", scheme)] * 3
        targets = [port["targetPort"] for one in objects if one["kind"] == "Service" for port in one["spec"]["ports"]]
        assert targets == ["http", "admin"]
        endpoint = of_kind(objects, "ServiceMonitor")["spec"]["endpoints"][0]
        assert endpoint.get("scheme") == (None if scheme == "HTTP" else "https")


def test_a_scrape_verifies_the_certificate_if_it_is_said_how(tmp_path: Path) -> None:
    """Without a way, the ServiceMonitor says that it does not verify; with one, nothing of that is left."""
    own = {"serverName": "d2lpm.example", "ca": {"secret": {"name": "certificate", "key": "ca.crt"}}}
    for given, expected in (({}, {"insecureSkipVerify": True}), (own, own)):
        values = {"tls": {"existingSecret": "a"}, "serviceMonitor": {"enabled": True, "tlsConfig": given}}
        endpoint = of_kind(render(tmp_path, values), "ServiceMonitor")["spec"]["endpoints"][0]
        assert endpoint["tlsConfig"] == expected


def test_replicas_of_a_cluster_know_their_store_their_secret_and_their_own_address(tmp_path: Path) -> None:
    """They keep no state of their own, only they reach the port at which they talk, and one of them is scraped."""
    chosen = {**CHOICES["cluster"]["on"], **CHOICES["policies"]["on"], **CHOICES["monitoring"]["on"]}
    objects = render(tmp_path, chosen)
    settings = yaml.safe_load(of_kind(objects, "ConfigMap", NAME)["data"]["router.yaml"])
    assert (settings["cluster"], "state" in settings) == ("valkey://store:6379/llm", False)
    deployment = of_kind(objects, "Deployment")["spec"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (3, "RollingUpdate")
    assert of_kind(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    pod = deployment["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings["drain_delay"] + settings["drain_timeout"]
    (container,) = pod["containers"]
    variables = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert variables["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert variables["D2LPM_CLUSTER_ADDRESS"] == "$(POD_IP):7000"
    assert container["ports"][-1] == {"name": "cluster", "containerPort": 7000}
    folder = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}["cluster"]
    (secret,) = [one["secret"] for one in pod["volumes"] if one["name"] == "cluster"]
    assert settings["cluster_secret_file"] == f"{folder}/{secret['items'][0]['path']}"
    rule = of_kind(objects, "NetworkPolicy", NAME)["spec"]["ingress"][-1]
    assert rule["ports"] == [{"port": "cluster"}]
    assert rule["from"] == [{"podSelector": deployment["selector"]}]
    assert of_kind(objects, "ScrapeConfig")["spec"]["staticConfigs"] == [{"targets": [f"{NAME}-admin.llm.svc:9000"]}]
    assert "ServiceMonitor" not in {one["kind"] for one in objects}


def test_a_cluster_may_have_its_url_in_a_secret_and_needs_a_secret(tmp_path: Path) -> None:
    """A URL with a password is in no configuration; without a secret nothing is rendered."""
    objects = render(tmp_path, {"cluster": {"enabled": True, "existingSecret": "cluster"}})
    (container,) = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    (variable,) = [one for one in container["env"] if one["name"] == "D2LPM_CLUSTER"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "cluster", "key": "cluster-url"}}
    assert "cluster" not in yaml.safe_load(of_kind(objects, "ConfigMap")["data"]["router.yaml"])
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(tmp_path, {"cluster": {"enabled": True, "url": "valkey://store:6379/llm"}})
    assert "cluster.existingSecret is missing" in refused.value.stderr


def test_replicas_of_a_cluster_may_encrypt_what_they_tell_each_other(tmp_path: Path) -> None:
    """The router reads certificate, key and authority where the Secret is mounted, and without one reads none."""
    chosen = {"enabled": True, "url": "valkey://store:6379/llm", "existingSecret": "cluster"}
    for tls in ({}, {"tls": {"existingSecret": "replicas"}}):
        objects = render(tmp_path, {"cluster": {**chosen, **tls}})
        settings = yaml.safe_load(of_kind(objects, "ConfigMap")["data"]["router.yaml"])
        pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
        volumes = {one["name"]: one for one in pod["volumes"]}
        mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        files = {name: path for name, path in settings.items() if name.startswith("cluster_tls_")}
        if not tls:
            assert not files
            assert "cluster-tls" not in {*volumes, *mounts}
            continue
        assert volumes["cluster-tls"]["secret"] == {"secretName": "replicas"}
        folder = mounts["cluster-tls"]
        members = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
        assert files == {f"cluster_tls_{kind}": f"{folder}/{member}" for kind, member in members.items()}


def test_a_cluster_whose_lease_is_in_kubernetes_may_write_one_and_no_other_may(tmp_path: Path) -> None:
    """The store's URL, in the configuration or in a Secret, is that of the state alone then."""
    chosen = {"enabled": True, "existingSecret": "cluster", "lease": "kubernetes"}
    discovery = {"enabled": False}
    objects = render(tmp_path, {"cluster": {**chosen, "url": "valkey://store:6379/llm"}, "discovery": discovery})
    settings = yaml.safe_load(of_kind(objects, "ConfigMap")["data"]["router.yaml"])
    assert (settings["cluster"], settings["cluster_store"]) == ("kubernetes", "valkey://store:6379/llm")
    (rule,) = of_kind(objects, "Role")["rules"]
    assert (rule["resources"], {"get", "create", "update", "watch"} - set(rule["verbs"])) == (["leases"], set())
    assert of_kind(objects, "RoleBinding")["roleRef"]["name"] == of_kind(objects, "Role")["metadata"]["name"]
    assert of_kind(objects, "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"]
    objects = render(tmp_path, {"cluster": chosen, "discovery": discovery})
    (container,) = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "D2LPM_CLUSTER_STORE" in {one["name"] for one in container["env"]}
    in_store = render(tmp_path, {"cluster": {**chosen, "lease": "store"}, "discovery": discovery})
    assert "Role" not in {one["kind"] for one in in_store}
    assert not of_kind(in_store, "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"]
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(tmp_path, {"cluster": {**chosen, "lease": "etcd"}})
    assert "cluster.lease is store or kubernetes" in refused.value.stderr


def test_no_key_is_in_a_configuration(tmp_path: Path) -> None:
    """Keys are in the Secret alone, from where the router gets them as environment variables or as a file."""
    objects = render(tmp_path, dict(CHOICES["keys"]["given"]))
    assert of_kind(objects, "Secret")["stringData"]["admin-key"] == KEY
    assert not [one["kind"] for one in objects if one["kind"] != "Secret" and KEY in json.dumps(one)]
    container = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {one["name"]: one["valueFrom"]["secretKeyRef"]["key"] for one in container["env"]} == {
        "D2LPM_ADMIN_KEY": "admin-key",
        "D2LPM_WORKER_API_KEY": "worker-api-key",
    }


def test_the_router_is_confined(tmp_path: Path) -> None:
    """It is not root, writes only to volumes, and there is one of it, with time to drain."""
    objects = render(tmp_path, {})
    deployment = of_kind(objects, "Deployment")["spec"]
    pod = deployment["template"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    assert pod["securityContext"]["runAsNonRoot"]
    limits = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert pod["containers"][0]["securityContext"] == limits
    settings = yaml.safe_load(of_kind(objects, "ConfigMap")["data"]["router.yaml"])
    assert pod["terminationGracePeriodSeconds"] > settings["drain_timeout"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_kustomize_base_is_valid() -> None:
    """The base has the objects of the manifest, and an overlay changes its image and its workers."""
    objects = kustomized(ROOT / "deploy/kubernetes")
    assert mistakes(objects) == ""
    ports = {one["metadata"]["name"]: [port["port"] for port in one["spec"]["ports"]] for one in _services(objects)}
    assert (ports["d2lpm"], ports["d2lpm-admin"]) == ([8000], [9000]), "operators have a Service of their own"
    manifest = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/d2lpm.yaml").read_text("utf-8")))
    assert sorted((one["kind"], one["metadata"]["name"]) for one in objects) == sorted(
        (one["kind"], one["metadata"]["name"]) for one in manifest
    )
    overlaid = kustomized(ROOT / "deploy/kustomize-example")
    assert mistakes(overlaid) == ""
    assert of_kind(overlaid, "StatefulSet")["spec"]["replicas"] == 4
    image = of_kind(overlaid, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "registry.example/d2lpm-router:0.1.0"


def _services(objects: Objects) -> Objects:
    return [one for one in objects if one["kind"] == "Service"]
