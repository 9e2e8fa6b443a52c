"""Starts vLLM servers and pytest runs by forking: a process of its own would import for 12 seconds first.

Reads a job per line of JSON from its standard input and answers each with the id of the new process, which leads a
process group and ends with this one. Runs in vLLM's environment, in the folder with its tests. An ended process keeps
its id until this one ends.
"""

import ctypes
import importlib
import json
import multiprocessing.context
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import pytest

MODELS, MODEL = "vllm.model_executor.models.llama", "LlamaForCausalLM"
"""The module and class of the only model that servers load."""
IMPORTED = (
    "tests.conftest",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.serve",
    MODELS,
    "vllm.v1.worker.cpu_worker",
)
END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl."""


def import_all() -> None:
    """Import what both kinds of job need, which starts no threads."""
    sys.path.insert(0, os.getcwd())
    for name in IMPORTED:
        importlib.import_module(name)
    register_model()


def register_model() -> None:
    """Let vLLM look at the model's class here, instead of importing everything in one more process per server."""
    registry = importlib.import_module("vllm.model_executor.models").ModelRegistry
    registry.register_model(MODEL, getattr(sys.modules[MODELS], MODEL))


def serve(arguments: Sequence[str]) -> None:
    """Be the command `vllm`."""
    # vLLM starts its engine's process anew on CPU. Forked, it has the imports; all else is as vLLM does it.
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    sys.argv = ["vllm", *arguments]
    importlib.import_module("vllm.entrypoints.cli.main").main()


def test(arguments: Sequence[str]) -> None:
    """Be the command `pytest`."""
    pytest.main([*arguments])


JOBS: Mapping[str, Callable[[Sequence[str]], None]] = {"vllm": serve, "pytest": test}


def fork(job: Mapping[str, object]) -> int:
    """Start a job and return its process id."""
    process = os.fork()
    if process == 0:
        become(job)
    os.setpgid(process, process)
    return process


def become(job: Mapping[str, object]) -> NoReturn:
    """Run a job in this forked process, with its output in a file, and end."""
    ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGTERM)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(str(job["log"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    environment, arguments = job["environment"], job["arguments"]
    assert isinstance(environment, dict)
    assert isinstance(arguments, list)
    os.environ.update(environment)
    try:
        JOBS[str(job["program"])](arguments)
    except Exception:
        traceback.print_exc()  # this process ends before the interpreter would print it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    import_all()
    for line in sys.stdin:
        print(fork(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
