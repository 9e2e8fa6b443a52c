"""The files for deployment agree with the program that they start."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from router.sources import load
from workers.settings import parse_settings

ROOT = Path(__file__).parent.parent


@pytest.fixture
def services() -> dict[str, Any]:
    composed: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
    return composed


def test_the_composed_router_finds_the_composed_workers(services: dict[str, Any]) -> None:
    """Each worker of the file is a service that listens at that port on every address."""
    settings = load({"--config": str(ROOT / "deploy/router.yaml")}, {})
    for worker in settings.worker:
        name, port = worker.id.split(":")
        service = services[name]
        assert service["entrypoint"] == ["python", "-m", "workers"]
        listening = parse_settings(service["command"])
        assert (listening.host, listening.port) == ("0.0.0.0", int(port))
    assert len(settings.worker) == len(services) - 1


def test_the_composed_router_reads_the_file_that_is_mounted(services: dict[str, Any]) -> None:
    """The path in the command is the one in the volume."""
    router = services["router"]
    source, target, _ = router["volumes"][0].split(":")
    assert (ROOT / source).is_file()
    assert router["command"] == ["serve", "--config", target]
