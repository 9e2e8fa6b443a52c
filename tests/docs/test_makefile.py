"""The Makefile installs little at a newcomer's first command, and the rest later."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTS = ("constraints.txt", "constraints-image.txt", "constraints-build.txt")


def lists_of(target: str, folder: Path) -> list[str]:
    """Return the lists that this target installs in a checkout without an environment, in order."""
    command = ["make", "--dry-run", f"VENV={folder / 'venv'}", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    installs = [line for line in done.stdout.splitlines() if " pip install " in line and "--requirement" in line]
    assert all("--require-hashes --no-deps" in line for line in installs)
    return re.findall(r"--requirement (\S+)", "\n".join(installs))


@pytest.mark.parametrize("target", ["serve", "demo"])
def test_a_first_command_installs_only_what_serving_needs(target: str, tmp_path: Path) -> None:
    """It installs the build backend and what the image holds, by their hashes, and no tool of development."""
    assert lists_of(target, tmp_path) == ["constraints-build.txt", "constraints-image.txt"]


@pytest.mark.parametrize("target", ["dev", "lint", "test", "bench"])
def test_the_development_environment_comes_on_top(target: str, tmp_path: Path) -> None:
    """It uses the same folder, so whoever has served installs only the rest."""
    assert lists_of(target, tmp_path) == ["constraints-build.txt", "constraints-image.txt", "constraints.txt"]


def test_what_serving_needs_is_a_part_of_the_development_environment() -> None:
    """Each package has one version in all lists, so that adding to an environment changes nothing in it."""
    everything, image, build = (set(re.findall(r"(?m)^\S+==\S+", (ROOT / name).read_text("utf-8"))) for name in LISTS)
    assert image
    assert build
    assert everything > image | build
