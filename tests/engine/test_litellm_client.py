"""Tests the kinds of LiteLLM's calls that a real engine serves. Needs the environment of `make test-litellm`."""

import json
import subprocess
from typing import Any

import pytest

from .environment import ROOT
from .fleet import Router

pytestmark = pytest.mark.engine

PYTHON = ROOT / ".venv-litellm" / "bin" / "python"
SPEAK = ROOT / "tests" / "litellm_client" / "speak.py"
SERVED = ("chat", "text", "responses", "messages", "refused")


def test_litellm_reads_what_the_engine_serves(router: Router) -> None:
    """LiteLLM reads chats, texts, responses and messages, and raises its own exception for an error."""
    command = [str(PYTHON), str(SPEAK), router.url, "tiny", *SERVED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    text, _, output = results["chat"]
    assert 0 < output <= 8
    assert results["chat stream"] == text
    assert 0 < results["text"][2] <= 8
    assert 0 < results["response"][1] <= 16  # LiteLLM asks for no fewer
    assert results["response events"][0] == "response.created"
    assert results["response events"][1] in ("response.completed", "response.incomplete")
    assert results["message"][0] == "text"
    assert results["unknown model"] == 404
