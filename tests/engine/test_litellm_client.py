"""LiteLLM's client: the kinds of its calls that this engine serves. Its environment is that of `make test-litellm`."""

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
    """Chats, texts, responses and messages, whole and streamed, and an error as its own exception."""
    command = [str(PYTHON), str(SPEAK), router.url, "tiny", *SERVED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    text, _, output = told["chat"]
    assert 0 < output <= 8
    assert told["chat stream"] == text
    assert 0 < told["text"][2] <= 8
    assert 0 < told["response"][1] <= 16  # LiteLLM asks for no fewer
    assert told["response events"][0] == "response.created"
    assert told["response events"][1] in ("response.completed", "response.incomplete")
    assert told["message"][0] == "text"
    assert told["unknown model"] == 404
