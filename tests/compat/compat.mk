# vLLM's own API tests (make test-compat ARGS="chat completions" for some of them), and the client libraries of others,
# at the router before real vLLM servers.
.PHONY: test-compat test-clients added-time
export ENGINE_VENV ?= .venv-engine
COMPAT_VENV := .venv-compat
CLIENTS_VENV := .venv-clients

# vLLM's tests see vLLM's packages, and those that they need beside them.
$(COMPAT_VENV)/.installed: tests/compat/constraints.txt
	$(ENGINE_VENV)/bin/python -m venv --clear $(COMPAT_VENV)
	$(COMPAT_VENV)/bin/python -m pip install --quiet --require-hashes --no-deps --only-binary=:all: --requirement $<
	$(ENGINE_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])' > $(COMPAT_VENV)/lib/python3.11/site-packages/z_vllm.pth
	@touch $@

$(CLIENTS_VENV)/.installed: tests/compat/clients/constraints.txt
	$(PYTHON) -m venv --clear $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --require-hashes --no-deps --only-binary=:all: --requirement $<
	@touch $@

.venv-engine/complete: tests/engine/environment.py
	@$(PYTHON) $<

test-compat: $(STAMP) $(ENGINE_VENV)/complete
	@$(MAKE) --no-print-directory $(COMPAT_VENV)/.installed
	$(VENV)/bin/python -m tests.compat $(ARGS)

# What the router adds to the time per token, measured with vLLM's benchmark, for docs/results.md.
added-time: $(STAMP) $(ENGINE_VENV)/complete
	@$(MAKE) --no-print-directory $(COMPAT_VENV)/.installed
	$(VENV)/bin/python -m tests.compat.added_time $(ARGS)

test-clients: $(STAMP) $(ENGINE_VENV)/complete $(CLIENTS_VENV)/.installed $(LITELLM_VENV)/.installed
	@$(MAKE) --no-print-directory $(COMPAT_VENV)/.installed
	$(VENV)/bin/pytest tests/compat/clients -q -p no:randomly
