"""The files for deployment agree with each other and with the programs that they start."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from router.config.sources import load
from tests.support.dockerfile import instructions, last_instruction
from workers.settings import parse_settings

ROOT: Final = Path(__file__).parents[2]
COMPOSED: Final[dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: Final[dict[str, Any]] = COMPOSED["services"]
PINNED: Final = re.compile(r"[a-z0-9/-]+:v?\d+\.\d+\.\d+(-[a-z-]+)?")


def profiles(service: str) -> list[str]:
    """Return the profiles with which the service starts; it always starts if there are none."""
    listed: list[str] = SERVICES[service].get("profiles", [])
    return listed


def known_as(service: str) -> list[str]:
    """Return the names by which other services reach this one."""
    networks = SERVICES[service].get("networks", {})
    return [service, *networks.get("default", {}).get("aliases", [])]


def test_the_router_finds_two_workers_whatever_the_profile() -> None:
    """For each profile, each worker of deploy/router.yaml is one service that listens at its port on every address."""
    workers = [worker.id.split(":") for worker in load({"--config": str(ROOT / "deploy/router.yaml")}, {}).worker]
    for profile in ("emulated", "vllm", "sglang"):
        for name, port in workers:
            (service,) = [s for s in SERVICES if profile in profiles(s) and name in known_as(s)]
            flags = SERVICES[service]["command"]
            assert flags[flags.index("--host") :] == ["--host", "0.0.0.0", "--port", port]
        assert sum(profile in profiles(service) for service in SERVICES) == len(workers)


def test_prometheus_and_grafana_find_their_targets() -> None:
    """Each target address is a service's name and the port at which its container listens."""
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8"))["scrape_configs"]
    sources = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text("utf-8"))
    addresses = [target for job in scraped for group in job["static_configs"] for target in group["targets"]]
    addresses += [source["url"].removeprefix("http://") for source in sources["datasources"]]
    for address in addresses:
        name, _, port = address.partition(":")
        assert port in [mapping.rpartition(":")[2] for mapping in SERVICES[name]["ports"]]
    exposed = last_instruction("EXPOSE").rest.split()
    assert SERVICES["router"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in exposed]
    deployed = load({"--config": str(ROOT / "deploy/router.yaml")}, {})
    assert exposed == [str(deployed.port), str(deployed.admin_port)]


def test_the_emulated_worker_accepts_its_flags() -> None:
    """`python -m workers` accepts the flags of the compose file."""
    assert SERVICES["worker-1"]["entrypoint"] == ["python", "-m", "workers"]
    assert parse_settings(SERVICES["worker-1"]["command"]).dialect == "vllm"


def test_the_profile_in_the_readme_starts_what_it_promises() -> None:
    """Router, Prometheus and Grafana start always, the emulated workers by a profile.

    A copy of .env.example makes it the default.
    """
    assert [service for service in SERVICES if not profiles(service)] == ["router", "prometheus", "grafana"]
    assert "COMPOSE_PROFILES=emulated" in (ROOT / ".env.example").read_text("utf-8").splitlines()
    assert "docker compose --profile emulated up" in (ROOT / "README.md").read_text("utf-8")
    named = {profile for service in SERVICES for profile in profiles(service)}
    assert named == {"emulated", "vllm", "sglang"}


def test_every_image_has_a_pinned_version() -> None:
    """All images are pinned, so that the same ones start tomorrow; the one built here has the project's version."""
    images = {service["image"] for service in SERVICES.values()}
    bases = {one.arguments[0] for one in instructions() if one.name == "FROM"}
    assert [image for image in images | bases if not PINNED.fullmatch(image)] == []
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert version is not None
    assert {s["image"] for s in SERVICES.values() if "build" in s} == {f"d2lpm-router:{version[1]}"}


@pytest.mark.parametrize("name", [name for name in SERVICES if "gpu" not in str(SERVICES[name].get("deploy"))])
def test_services_are_confined(name: str) -> None:
    """The root file system is read-only, there are no capabilities and no new privileges, and ports are open on
    localhost alone.
    """
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_every_mounted_path_exists(name: str) -> None:
    """Each source is a file or folder of this project, mounted read-only, or a volume that the file declares."""
    for mount in SERVICES[name].get("volumes", []):
        source, _, rest = mount.partition(":")
        if source.startswith("./"):
            assert (ROOT / source).exists()
            assert rest.endswith(":ro")
        else:
            assert source in COMPOSED["volumes"]


def test_commands_name_files_that_are_mounted() -> None:
    """Each absolute path in a command is in a mount, and exists if that mount is a folder of the project."""
    for service in SERVICES.values():
        mounts = dict(reversed(mount.removesuffix(":ro").split(":")) for mount in service.get("volumes", []))
        for argument in [*service.get("entrypoint", []), *service.get("command", [])]:
            for path in re.findall(r"(?:^|=)(/.+)", argument):
                (target,) = [target for target in mounts if path == target or path.startswith(target + "/")]
                source = mounts[target]
                assert not source.startswith("./") or (ROOT / source / path[len(target) :].lstrip("/")).exists()


def test_the_image_is_built_in_stages_and_does_not_run_as_root() -> None:
    """Build tools stay in the first stage, the user is a number other than root's, and there is a health check."""
    assert last_instruction("FROM").stage == 2
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last_instruction("USER").rest)
    assert f"'D2LPM_PORT', '{last_instruction('EXPOSE').rest.split()[0]}'" in last_instruction("HEALTHCHECK").rest
    assert not [one for one in instructions() if one.stage == 2 and one.name == "RUN"]


def test_what_the_image_copies_is_not_ignored() -> None:
    """Each copied source exists, and .dockerignore, which excludes everything else, admits it."""
    let_through = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert let_through[0] == "*"
    sources = [word for one in instructions() if one.name == "COPY" and one.stage == 1 for word in one.arguments[:-1]]
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in let_through


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Return a folder with a `vllm` and a `python3` that print their arguments, one a line."""
    for name in ("vllm", "python3"):
        (tmp_path / name).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def launched(engine: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{engine}:/usr/bin:/bin", "KV_EVENTS_PORT": "6000"}
    command = ["sh", str(ROOT / "workers/launch" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("script", "command", "flags", "enabling"),
    [
        (
            "vllm.sh",
            ["serve", "a model"],
            {"--enable-prompt-tokens-details", "--kv-cache-metrics", "--scheduling-policy"},
            {"enable_kv_cache_events": True},
        ),
        (
            "sglang.sh",
            ["-m", "sglang.launch_server", "--model-path", "a model"],
            {"--enable-cache-report", "--enable-metrics", "--schedule-policy", "--page-size"},
            {},
        ),
    ],
)
def test_launch_scripts_enable_what_the_router_reads(
    script: str, command: list[str], flags: set[str], enabling: dict[str, bool], engine: Path
) -> None:
    """The script enables usage, metrics, FCFS and KV events, and puts the operator's flags last, so that these take
    precedence.
    """
    done = launched(engine, script, "a model", "--port", "8000")
    assert (done.returncode, done.stderr) == (0, "")
    arguments = done.stdout.splitlines()
    assert arguments[: len(command)] == command
    assert arguments[-2:] == ["--port", "8000"]
    assert {word for word in arguments if word.startswith("--")} == {
        *flags,
        *("--kv-events-config", "--port"),
        *(word for word in command if word.startswith("--")),
    }
    policy = next(at for at, word in enumerate(arguments) if word in ("--schedule-policy", "--scheduling-policy"))
    assert arguments[policy + 1] == "fcfs"
    events = json.loads(arguments[arguments.index("--kv-events-config") + 1])
    endpoints = {"publisher": "zmq", "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:6001"}
    assert events == {**enabling, **endpoints}


@pytest.mark.parametrize("script", ["vllm.sh", "sglang.sh"])
def test_a_launch_without_a_model_is_an_error(script: str, engine: Path) -> None:
    """The error is one line that names the missing model, and nothing is started."""
    done = launched(engine, script)
    assert done.returncode != 0
    assert (done.stdout, "MODEL" in done.stderr, done.stderr.count("\n")) == ("", True, 1)
