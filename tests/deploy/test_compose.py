"""Tests that the compose file is valid, and that the image holds what the router needs and no more."""

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
"""Formats of compose itself, which no JSON schema describes."""


@pytest.fixture
def composed() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    return found


def test_the_compose_file_fits_the_schema(composed: dict[str, Any]) -> None:
    """The specification's schema accepts the file, and rejects it once a service has an unknown key."""
    valid = fastjsonschema.compile(json.loads(SCHEMA.read_text("utf-8")), formats=FORMATS)
    valid(composed)
    for name in SERVICES:
        composed["services"][name]["prots"] = []
        with pytest.raises(fastjsonschema.JsonSchemaValueException, match="prots"):
            valid(composed)
        del composed["services"][name]["prots"]


def test_the_image_holds_what_the_router_needs_and_no_more(image: Image) -> None:
    """The image has the command and the libraries for KV events, but neither pip nor the tools of the tests."""
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
