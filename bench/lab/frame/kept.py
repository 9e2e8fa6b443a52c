"""Keep the figures of simulations in a folder, one file each, so that an experiment can be resumed."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.lab.frame.experiment import Value

if TYPE_CHECKING:
    from bench.lab.frame.runner import Task

ROOT: Final = Path(__file__).parents[3]
SOURCES: Final = ("router/core/**/*.py", "workers/engine/**/*.py", "bench/**/*.py")
"""The files that determine the figures of a simulation."""

ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
"""The address in the default repr of an object: part of a window, which is new in each process."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The figures kept in one folder, which is created with the first of them. Methods raise OSError."""

    folder: Path
    sources: Iterable[str] = SOURCES
    """Patterns below the project's root. Figures are invalid once any of these files has changed."""

    def find(self, task: "Task") -> Mapping[str, Value] | None:
        """Return the figures of this simulation if it was run under the same conditions."""
        try:
            document = json.loads(self._path(task).read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        match document:
            case {"conditions": conditions, "figures": dict(figures)} if conditions == self._conditions(task):
                return figures
        return None

    def keep(self, task: "Task", figures: Mapping[str, Value]) -> None:
        """Write the figures atomically, replacing those of other conditions."""
        path = self._path(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        document = {"conditions": self._conditions(task), "figures": figures}
        partial.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        partial.replace(path)

    def _path(self, task: "Task") -> Path:
        words = "".join(letter if letter.isalnum() or letter in "-+." else "_" for letter in task.cell.name)
        return self.folder / f"{type(task.experiment).__name__}-{words}-seed{task.seed}.json"

    def _conditions(self, task: "Task") -> Mapping[str, object]:
        return {
            "labels": dict(task.cell.labels),
            "seed": task.seed,
            "scenario": sha256(ADDRESS.sub("", repr(task.cell.scenario)).encode()).hexdigest(),
            "code": _digest(tuple(self.sources)),
        }


@cache
def _digest(patterns: tuple[str, ...]) -> str:
    """Return a digest of all files' paths and contents."""
    digest = sha256()
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        digest.update(os.fsencode(path.relative_to(ROOT)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
