"""Where the environments lie: those of the engine, of vLLM's tests and of clients."""

import os
from pathlib import Path

from tests.engine.environment import ROOT, VLLM

ENGINE = Path(os.environ.get("ENGINE_VENV", VLLM.folder)).absolute() / "bin"
VLLM_TESTS = Path(os.environ.get("COMPAT_VENV", ROOT / ".venv-compat")).absolute() / "bin" / "python"
CLIENTS = Path(os.environ.get("CLIENTS_VENV", ROOT / ".venv-clients")).absolute() / "bin" / "python"
LITELLM = Path(os.environ.get("LITELLM_VENV", ROOT / ".venv-litellm")).absolute() / "bin" / "python"
