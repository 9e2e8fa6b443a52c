"""The compose file is one, and so is the image."""

import json
import subprocess
from typing import Any, Final

import fastjsonschema
import pytest
import yaml

from tests.support.dockerfile import ROOT, last_instruction

from .environment import SCHEMA
from .image import Image
from .stack import SERVICES

FORMATS: Final = {"duration": r"^(\d+(us|ms|s|m|h))+$", "ports": r"^[\d.:/tcpud-]+$", "expose": r"^[\d/-]+$"}
"""Of compose's own, which no JSON schema describes."""


@pytest.fixture
def composed() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    return found


def test_the_compose_file_is_one(composed: dict[str, Any]) -> None:
    """The specification's schema takes it, and takes it no more with a key that there is not."""
    valid = fastjsonschema.compile(json.loads(SCHEMA.read_text("utf-8")), formats=FORMATS)
    valid(composed)
    for name in SERVICES:
        composed["services"][name]["prots"] = []
        with pytest.raises(fastjsonschema.JsonSchemaValueException, match="prots"):
            valid(composed)
        del composed["services"][name]["prots"]


def test_the_image_has_what_runs_and_no_more(image: Image) -> None:
    """The command and the events' library are there; neither pip nor anything of the tests."""
    python = image.folder / "opt" / "d2lpm" / "bin" / "python"
    look = "from importlib.metadata import distributions; print(*sorted(d.name.lower() for d in distributions()))"
    environment = {**image.environment, "PYTHONPATH": ""}
    done = subprocess.run([python, "-c", look], env=environment, cwd="/", capture_output=True, text=True, check=True)
    installed = set(done.stdout.split())
    assert {"d2lpm-router", "pyzmq", "msgpack", "uvloop"} <= installed
    assert installed.isdisjoint({"pip", "hatchling", "pytest", "openai", "mypy"})
    assert (python.parent / image.entrypoint[0]).exists()
    assert image.command == ["serve"]
    assert last_instruction("USER").rest != "root"
