# Makes every alert fire by a fault in a running stack. Prometheus is that of `make test-deploy`, the store that of `make
# test-cluster`. Takes some minutes.
.PHONY: test-alerts

test-alerts: $(STAMP)
	@$(VENV)/bin/python tests/deploy/environment.py
	@$(VENV)/bin/python -m tests.cluster.replicas.environment
	$(VENV)/bin/pytest tests/alerts -q -p no:randomly $(ARGS)
