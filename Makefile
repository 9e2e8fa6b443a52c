# Needs Python 3.11 or newer (make PYTHON=python3.13 picks one), make and git; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: serve demo test lint chaos shapes results sweeps results-full bench clean lock

serve: $(STAMP)
	@exec $(VENV)/bin/d2lpm serve --emulate 2 $(ARGS)

demo: $(STAMP)
	@exec $(VENV)/bin/d2lpm demo $(ARGS)

test: lint
	$(VENV)/bin/pytest -n 3

lint: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest -q tests/docs/test_architecture.py tests/docs/test_names.py

# Faults of all kinds for ten minutes, the death of the router, processes that stand still for 40 s, ten times more than
# can be done, a million calls, and five attacks on the router's memory and its loop
# (make chaos CHAOS=chaos.soak for one of them); the short forms are tests.
CHAOS := chaos chaos.restart chaos.pause chaos.overload chaos.soak attacks
chaos: $(STAMP)
	@for show in $(CHAOS); do $(VENV)/bin/python -m tests.$$show || exit 1; done

# The shapes of the experiments that take too long for every test run: about four minutes of one core.
shapes: $(STAMP)
	$(VENV)/bin/pytest -n 2 --dist loadfile tests/bench/lab/slow_experiment_shapes.py

# Every experiment in full, for docs/results.md: about half an hour of two cores.
results: $(STAMP)
	$(VENV)/bin/python -m bench experiment all --out docs/results $(ARGS)

# What the defaults rest on: every policy and parameter on every workload, and the workers' caches; under an hour.
sweeps: $(STAMP)
	$(VENV)/bin/python -m bench experiment sweeps --out docs/results $(ARGS)

# The default and the best five policies at four loads, with programs run to their end: hours. What was run is kept in
# .results-full, and run again only where the code or the conditions changed.
results-full: $(STAMP)
	$(VENV)/bin/python -m bench experiment full --resume .results-full --out docs/results $(ARGS)

bench: $(STAMP)
	@$(VENV)/bin/python -m bench decision-cost $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

# Everything comes by its hash, the build backend too, so that nothing is built in an environment of its own: there no
# hash would count. This package itself is installed last, and nothing with it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "This needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.13" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --require-hashes --no-deps --requirement constraints.txt
	$(VENV)/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	$(VENV)/bin/python -m pip check
	@touch $@

# The lock files, anew: versions stay where pyproject.toml lets them (make lock ARGS=--upgrade takes the newest).
LOCK = $(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet uv
	cp constraints.txt $(VENV)-lock/all.txt
	printf 'hatchling\neditables\n' > $(VENV)-lock/build.in
	$(LOCK) $(ARGS) --extra dev pyproject.toml $(VENV)-lock/build.in --output-file $(VENV)-lock/all.txt
	$(LOCK) --extra events --constraint $(VENV)-lock/all.txt pyproject.toml --output-file $(VENV)-lock/image.txt
	$(LOCK) --constraint $(VENV)-lock/all.txt $(VENV)-lock/build.in --output-file $(VENV)-lock/build.txt
	for each in constraints:all constraints-image:image constraints-build:build; do \
		{ grep '^#' $${each%:*}.txt; cat $(VENV)-lock/$${each#*:}.txt; } > $(VENV)-lock/new.txt && mv $(VENV)-lock/new.txt $${each%:*}.txt; \
	done

# Target test-engine: the same router before real vLLM and SGLang servers.
-include tests/engine/engine.mk
# Target test-litellm: LiteLLM's client at the router.
-include tests/litellm_client/client.mk
# Targets test-compat and test-clients: vLLM's own API tests at the router, and the clients that people use.
-include tests/compat/compat.mk

# Target test-deploy: the commands of docker-compose.yml, with a real Prometheus.
-include tests/deploy/deploy.mk
