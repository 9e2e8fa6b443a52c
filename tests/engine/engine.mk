# The router before two real vLLM servers for CPU, which live in an environment of their own (3.4 GB, made once).
.PHONY: test-engine

test-engine: $(STAMP) .venv-litellm/.installed
	@$(PYTHON) tests/engine/environment.py
	$(VENV)/bin/pytest tests/engine -q -p no:randomly
