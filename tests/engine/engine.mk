# Tests the router with real vLLM and SGLang servers for CPU, whose environments (3.7 GB) are made once.
NOT_HERE := --ignore-glob 'tests/engine/test_handoff*' --ignore tests/engine/test_ranks.py

.PHONY: engines test-engine test-handoffs test-ranks

engines:
	@$(PYTHON) tests/engine/environment.py

test-engine: $(STAMP) .venv-litellm/.installed engines
	$(VENV)/bin/pytest tests/engine -q -p no:randomly $(NOT_HERE)

# Prefill and decode at two vLLM servers that hand KV over with NIXL, which is downloaded (70 MB).
test-handoffs: $(STAMP) engines
	$(VENV)/bin/pytest tests/engine/test_handoffs.py tests/engine/test_handoff_age.py -q -p no:randomly

# One vLLM server with two data-parallel ranks, whose start takes minutes.
test-ranks: $(STAMP) engines
	$(VENV)/bin/pytest tests/engine/test_ranks.py -q -p no:randomly
