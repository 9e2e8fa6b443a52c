"""Everything the router does with workers over HTTP: calls, polls, discovery and checks of their flags."""
