# The live page in a real browser, and `d2lpm top` in a pseudo-terminal. Chromium is that of the distribution (apt-get
# install chromium; CHROMIUM=PATH names another), driven by Playwright from an environment of its own, which sees the
# packages of .venv.
.PHONY: test-page page-pictures page-cost
PAGE_VENV := .venv-page
export CHROMIUM ?= chromium

$(PAGE_VENV)/.installed: tests/page/constraints.txt $(STAMP)
	$(VENV)/bin/python -m venv --clear $(PAGE_VENV)
	$(PAGE_VENV)/bin/python -m pip install --quiet --require-hashes --no-deps --only-binary=:all: --requirement $<
	$(VENV)/bin/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> $$($(PAGE_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/z_project.pth
	@touch $@

test-page: $(PAGE_VENV)/.installed
	$(PAGE_VENV)/bin/python -m pytest tests/page -q -p no:randomly $(ARGS)

# The pictures of the documents, taken anew.
page-pictures: $(PAGE_VENV)/.installed
	$(PAGE_VENV)/bin/python -m tests.page.pictures docs/pictures

# What ten readers of the page cost the router: a minute and a half.
page-cost: $(STAMP)
	$(VENV)/bin/python -m tests.page.cost $(ARGS)
