"""Builds the image without a container engine: runs the Dockerfile's install steps in a folder instead of a root."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.dockerfile import ROOT, Instruction, instructions, last_instruction

STEP_SECONDS: Final = 300.0
OURS: Final = re.compile(r"(?<![\w.:-])/(src|wheels|opt)\b")
"""Absolute paths of folders that the build creates itself."""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image, and how its process starts."""

    folder: Path
    """Stands for the root of the image's file system."""
    environment: dict[str, str]
    entrypoint: list[str]
    command: list[str]


def build(folder: Path) -> Image:
    """Run the first stage in a clean Python. The second stage only copies what the first has made.

    Raises CalledProcessError if a step fails.
    """
    python = folder / "base"
    subprocess.run([sys.executable, "-m", "venv", python], check=True, timeout=STEP_SECONDS)
    path = f"{python}/bin:/usr/bin:/bin"
    directory = folder
    for step in instructions():
        if step.name == "WORKDIR":
            directory = Path(inside(folder, step.rest))
            directory.mkdir(parents=True)
        elif step.name == "COPY" and step.stage == 1:
            copy(step, directory)
        elif step.name == "RUN":
            command = ["sh", "-c", inside(folder, step.rest)]
            subprocess.run(command, cwd=directory, env=clean(path), check=True, timeout=STEP_SECONDS)
        elif step.name == "COPY":
            source, target = step.arguments
            assert source == target, "what is elsewhere in the second stage is not where it runs here"
    return Image(
        folder, variables(folder, path), last_instruction("ENTRYPOINT").arguments, last_instruction("CMD").arguments
    )


def inside(folder: Path, text: str) -> str:
    """Return a command or path with `folder` as its root."""
    return OURS.sub(lambda found: f"{folder}/{found[1]}", text)


def clean(path: str) -> dict[str, str]:
    """Return an environment with this path and without this process's Python; pip's settings and HOME are kept."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "HOME"}
    return {**kept, "PATH": path}


def copy(step: Instruction, directory: Path) -> None:
    """Copy the sources of a COPY step from the project into the build."""
    *sources, target = step.arguments
    for source in sources:
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, directory / target, ignore=ignored)
        else:
            shutil.copy(ROOT / source, directory / target)


def variables(folder: Path, path: str) -> dict[str, str]:
    """Return the ENV of the second stage."""
    given = dict(pair.split("=", 1) for pair in last_instruction("ENV").arguments)
    return {name: inside(folder, value).replace("$PATH", path) for name, value in given.items()}
