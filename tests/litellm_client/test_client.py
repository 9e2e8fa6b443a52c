"""LiteLLM's client at a router with emulated workers: every kind of call. `make test-litellm` runs this folder."""

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
def engines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Two emulated workers of each kind."""
    with emulated_workers(2, "--dialect", request.param) as urls:
        yield urls


async def test_litellm_reads_every_family(engines: list[str]) -> None:
    """Chats, texts, embeddings, rankings, responses, messages and errors; all of it is charged to its key."""
    async with running_router(*engines) as router:
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, Path(__file__).with_name("speak.py"), router.url, "m"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()[-3000:]
        told: dict[str, Any] = json.loads(out.splitlines()[-1])
        text, given, output = told["chat"]
        assert told["chat stream"] == text
        assert 0 < output <= 8
        assert told["text"][2] <= 8
        assert told["embeddings"][0] == 2
        assert told["rerank"] == [0, 1]
        assert told["response"][1] <= 16  # LiteLLM asks for no fewer
        assert told["response events"][0] == "response.created"
        assert told["response events"][1] in ("response.completed", "response.incomplete")
        assert told["message"][0] == "text"
        assert told["unknown model"] == 404
        served = await total_service(router)
        assert served[0] > given
        assert served[1] > output
        (client,) = (await router.fairness())["clients"]
        assert client.startswith("key-")
