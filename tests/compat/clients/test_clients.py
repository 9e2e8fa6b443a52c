"""Tests client libraries as their users have them, with nothing changed but the base URL, before two vLLM servers.

`make test-clients` runs this folder. Each library is used by a script in an environment of its own.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.environments import CLIENTS, ENGINE, LITELLM, VLLM_TESTS
from tests.compat.hub import make_hub, snapshot
from tests.compat.source import source_folder
from tests.engine.environment import ROOT
from tests.engine.fleet import STORING_BY, Router, VllmEngine

HERE = Path(__file__).parent
SCRIPTS = {
    "openai": (CLIENTS, HERE / "use_openai.py"),
    "anthropic": (CLIENTS, HERE / "use_anthropic.py"),
    "langchain-openai": (CLIENTS, HERE / "use_langchain.py"),
    "instructor": (CLIENTS, HERE / "use_instructor.py"),
    "litellm": (LITELLM, HERE / "use_litellm.py"),
}
FLAGS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--structured-outputs-config.backend=xgrammar",
    "--structured-outputs-config.disable_any_whitespace=true",  # of which a random model writes without end
)
START_SECONDS = 240.0


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """Start two vLLM servers that store responses and parse tool calls, and a router before them."""
    logs = tmp_path_factory.mktemp("logs")
    model = snapshot(make_hub(source_folder(VLLM_TESTS)), "Qwen/Qwen3-0.6B")
    launch = (ENGINE / "vllm", "serve")
    engines = [
        VllmEngine(name, model, logs / name, FLAGS, STORING_BY["vllm"], launch=launch) for name in ("first", "second")
    ]
    router = Router("router", engines, (), logs / "router")
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready(engine.ready_path, START_SECONDS)
        router.start()
        router.wait_ready("/ready", START_SECONDS)
        yield router
    finally:
        router.stop()
        for engine in engines:
            engine.kill()


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_client_library_gets_what_it_asks_for(library: str, router: Router) -> None:
    """The library's calls of every kind that vLLM serves are answered, and nothing is left in the router."""
    python, script = SCRIPTS[library]
    command = [str(python), str(script), router.url, "tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    router.wait_settled()
