# The compiled build: a wheel by mypyc, in an environment of its own; it needs a C compiler and some minutes.
.PHONY: compiled test-compiled

COMPILED := $(VENV)-compiled
COMPILED_TREE := build/compiled
SOURCES := $(shell git ls-files router)

compiled: $(COMPILED)/.installed
	@echo "Compiled. Run it: $(COMPILED)/bin/d2lpm serve"
	@echo "The wheel, for any machine like this one: $$(ls $(COMPILED)/wheel/*.whl)"

$(COMPILED)/.installed: $(STAMP) $(SOURCES) hatch_build.py
	$(PYTHON) -m venv $(COMPILED)
	$(COMPILED)/bin/python -m pip install --progress-bar off --no-color --require-hashes --no-deps --requirement constraints-image.txt
	rm -rf $(COMPILED)/wheel
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(VENV)/bin/python -m hatchling build -t wheel -d $(COMPILED)/wheel
	$(COMPILED)/bin/python -m pip install --quiet --no-deps --force-reinstall $(COMPILED)/wheel/*.whl
	@touch $@

# The suite with compiled code, in a copy of the tree that has the shared libraries beside the files, and the decisions of
# 500 random histories with and without it. No wheel has the experiments of bench/lab, which extend classes of the core.
test-compiled: $(COMPILED)/.installed
	rm -rf $(COMPILED_TREE)
	mkdir -p $(COMPILED_TREE)
	git ls-files -z | tar --null --files-from=- --create | tar --extract --directory $(COMPILED_TREE)
	unzip -q -o $(COMPILED)/wheel/*.whl '*.so' -d $(COMPILED_TREE)
	$(VENV)/bin/python -m tests.compiled.histories record $(COMPILED_TREE)/histories
	cd $(COMPILED_TREE) && PYTHONPATH=$$PWD ../../$(VENV)/bin/python -m tests.compiled.histories compare histories
	cd $(COMPILED_TREE) && PYTHONPATH=$$PWD ../../$(VENV)/bin/python -m pytest -n 3 --dist worksteal --ignore tests/docs --ignore tests/bench/lab
