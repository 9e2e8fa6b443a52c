# Tests the router with real vLLM and SGLang servers for CPU, whose environments (3.7 GB) are made once.
.PHONY: test-engine test-handoffs

test-engine: $(STAMP) .venv-litellm/.installed
	@$(PYTHON) tests/engine/environment.py
	$(VENV)/bin/pytest tests/engine -q -p no:randomly --ignore-glob 'tests/engine/test_handoff*'

# Prefill and decode at two vLLM servers that hand KV over with NIXL, which is downloaded (70 MB).
test-handoffs: $(STAMP)
	@$(PYTHON) tests/engine/environment.py
	$(VENV)/bin/pytest tests/engine/test_handoffs.py tests/engine/test_handoff_age.py -q -p no:randomly
