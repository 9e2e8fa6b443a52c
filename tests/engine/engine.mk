# Tests the router with real vLLM and SGLang servers for CPU, whose environments (3.7 GB) are made once.
.PHONY: test-engine

test-engine: $(STAMP) .venv-litellm/.installed
	@$(PYTHON) tests/engine/environment.py
	$(VENV)/bin/pytest tests/engine -q -p no:randomly
