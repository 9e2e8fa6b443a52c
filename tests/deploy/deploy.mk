# Runs the compose file's commands natively, with Debian's Prometheus, which is unpacked into .venv and not installed.
.PHONY: test-deploy

test-deploy: $(STAMP)
	@$(VENV)/bin/python tests/deploy/environment.py
	$(VENV)/bin/pytest tests/deploy -q -p no:randomly
