# Renders the Helm chart and the kustomize base with the real helm and kubectl, validates what they render, and starts the
# rendered router natively. The tools are in an environment of their own. ARGS=--all renders all combinations of values,
# which takes some minutes, and not only as many as have every pair of values.
.PHONY: test-chart
CHART_VENV := .venv-chart

$(CHART_VENV)/.installed: tests/chart/constraints.txt
	$(PYTHON) -m venv --clear $(CHART_VENV)
	$(CHART_VENV)/bin/python -m pip install --quiet --only-binary=:all: --requirement tests/chart/constraints.txt
	@touch $@

test-chart: $(STAMP) $(CHART_VENV)/.installed
	@$(VENV)/bin/python -m tests.chart.environment
	$(VENV)/bin/pytest tests/chart -q $(ARGS)
