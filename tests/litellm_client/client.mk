# Tests LiteLLM's client at the router. LiteLLM needs other versions of openai and huggingface_hub than the project, so
# it has an environment of its own.
.PHONY: test-litellm
LITELLM_VENV := .venv-litellm

$(LITELLM_VENV)/.installed: tests/litellm_client/constraints.txt
	$(PYTHON) -m venv --clear $(LITELLM_VENV)
	$(LITELLM_VENV)/bin/python -m pip install --quiet --only-binary=:all: --requirement tests/litellm_client/constraints.txt
	@touch $@

test-litellm: $(STAMP) $(LITELLM_VENV)/.installed
	$(VENV)/bin/pytest tests/litellm_client -q
