# Needs Python 3.11 or newer (make PYTHON=python3.13 picks one), make and git; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
# What serving needs; the development environment is the same folder with more in it, so nothing is installed twice.
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: serve demo dev test lint chaos shapes results sweeps results-full bench profile clean lock

serve: $(SERVING)
	@exec $(VENV)/bin/d2lpm serve --emulate 2 $(ARGS)

demo: $(SERVING)
	@exec $(VENV)/bin/d2lpm demo $(ARGS)

# The development environment: what the tests, `bench load`, `bench picture` and the experiments need.
dev: $(STAMP)

# With PROCESSES=3, the routers of tests are a scheduler and two fronts (test-engine and chaos, too). Tests that reach into
# the router's objects are skipped then; the end of the run counts them (tests/support/processes.py).
test: lint
	$(VENV)/bin/pytest -n 3 --dist worksteal

lint: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest -q tests/docs/test_architecture.py tests/docs/test_names.py

# Ten minutes of faults, the death of the router, processes that are stopped for 40 s, ten times more calls than the
# fleet can serve, a million calls, kills of single processes, two thousand streams through two fronts, ten minutes of faults
# of prefill and decode workers, and five attacks on the router's memory and event loop (make chaos CHAOS=chaos.soak runs
# one of them). Short forms of them are tests.
CHAOS := chaos chaos.restart chaos.kills chaos.many_streams chaos.pause chaos.overload chaos.soak chaos.handoffs attacks
chaos: $(STAMP)
	@for show in $(CHAOS); do $(VENV)/bin/python -m tests.$$show || exit 1; done

# Checks of the experiments' results that take too long for `make test`: about four minutes of one core.
shapes: $(STAMP)
	$(VENV)/bin/pytest -n 2 --dist loadfile tests/bench/lab/slow_experiment_shapes.py

# Every experiment in full, for docs/results.md: about fifty minutes of two cores.
results: $(STAMP)
	$(VENV)/bin/python -m bench experiment all --out docs/results $(ARGS)

# The measurements behind the defaults: every policy and parameter on every workload, and the workers' caches; under an
# hour.
sweeps: $(STAMP)
	$(VENV)/bin/python -m bench experiment sweeps --out docs/results $(ARGS)

# The default and the best five policies at four loads, with programs run to their end: hours. Finished simulations are
# kept in .results-full and reused while code and conditions stay the same.
results-full: $(STAMP)
	$(VENV)/bin/python -m bench experiment full --resume .results-full --out docs/results $(ARGS)

bench: $(STAMP)
	@$(VENV)/bin/python -m bench decision-cost $(ARGS)

# What each stage of the router costs a streamed request and a chunk, in CPU time: under a minute.
profile: $(STAMP)
	@$(VENV)/bin/python -m bench profile $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-compiled .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

# Everything comes by its hash, the build backend too, so that nothing is built in an environment of its own: there no
# hash would count. This package itself is installed last, and nothing with it.
HASHED = $(VENV)/bin/python -m pip install --progress-bar off --no-color --require-hashes --no-deps

$(SERVING): pyproject.toml constraints-image.txt constraints-build.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "This needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.13" >&2; \
		exit 1; }
	@echo "This happens once: a Python environment in $(VENV), with the 45 or so packages that serving needs (85 MB)."
	$(PYTHON) -m venv $(VENV)
	$(HASHED) --requirement constraints-build.txt --requirement constraints-image.txt
	$(VENV)/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	$(VENV)/bin/python -m pip check
	@touch $@

$(STAMP): $(SERVING) constraints.txt
	@echo "This happens once: the tools of development, also in $(VENV) (460 MB)."
	$(HASHED) --requirement constraints.txt
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
	$(LOCK) --extra cluster --extra events --extra otel --constraint $(VENV)-lock/all.txt pyproject.toml --output-file $(VENV)-lock/image.txt
	$(LOCK) --constraint $(VENV)-lock/all.txt $(VENV)-lock/build.in --output-file $(VENV)-lock/build.txt
	for each in constraints:all constraints-image:image constraints-build:build; do \
		{ grep '^#' $${each%:*}.txt; cat $(VENV)-lock/$${each#*:}.txt; } > $(VENV)-lock/new.txt && mv $(VENV)-lock/new.txt $${each%:*}.txt; \
	done

# Targets compiled and test-compiled: the router compiled by mypyc.
-include tests/compiled/compiled.mk
# Target test-engine: the router with real vLLM and SGLang servers.
-include tests/engine/engine.mk
# Target test-litellm: LiteLLM's client with the router.
-include tests/litellm_client/client.mk
# Targets test-compat and test-clients: vLLM's own API tests at the router, and the clients that people use.
-include tests/compat/compat.mk

# Target test-alerts: every alert fires because of a fault in a running stack.
-include tests/alerts/alerts.mk
# Target test-deploy: the commands of docker-compose.yml, with a real Prometheus.
-include tests/deploy/deploy.mk
# Targets test-page, page-pictures and page-cost: the live page in a real browser.
-include tests/page/page.mk
# Target test-chart: the Helm chart and the kustomize base, with the real helm and kubectl.
-include tests/chart/chart.mk
# Target test-cluster: three replicas, with a real Valkey or Redis server.
-include tests/cluster/replicas/cluster.mk
