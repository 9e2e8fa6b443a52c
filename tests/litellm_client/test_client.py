"""Tests every kind of call of LiteLLM's client at a router with emulated workers.

`make test-litellm` runs this folder.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import emulated_workers, running_router
from tests.support.served import total_service

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-litellm" / "bin" / "python"


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """Start two emulated workers of one kind, and yield the kind and their URLs."""
    with emulated_workers(2, "--dialect", request.param) as urls:
        yield request.param, urls


async def test_litellm_reads_every_family(engines: tuple[str, list[str]]) -> None:
    """LiteLLM reads the answer to every kind of call, and an error; its key is charged for all of them. SGLang has no
    path at which LiteLLM seeks a rerank.
    """
    kind, urls = engines
    async with running_router(*urls) as router:
        process = await asyncio.create_subprocess_exec(
            PYTHON,
            Path(__file__).with_name("speak.py"),
            router.url,
            "m",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()[-3000:]
        results: dict[str, Any] = json.loads(out.splitlines()[-1])
        text, given, output = results["chat"]
        assert results["chat stream"] == text
        assert 0 < output <= 8
        assert results["text"][2] <= 8
        assert results["embeddings"][0] == 2
        assert results["rerank"] == ([0, 1] if kind == "vllm" else 404)
        assert results["response"][1] <= 16  # LiteLLM asks for no fewer
        assert results["response events"][0] == "response.created"
        assert results["response events"][1] in ("response.completed", "response.incomplete")
        assert results["message"][0] == "text"
        assert results["unknown model"] == 404
        served = await total_service(router)
        assert served[0] > given
        assert served[1] > output
        (client,) = (await router.fairness())["clients"]
        assert client.startswith("key-")
