# Makes every alert fire by a fault in a running stack. Prometheus is that of `make test-deploy`. Takes some minutes.
.PHONY: test-alerts

test-alerts: $(STAMP)
	@$(VENV)/bin/python tests/deploy/environment.py
	$(VENV)/bin/pytest tests/alerts -q -p no:randomly $(ARGS)
