"""The compiled build: `make test-compiled`."""
