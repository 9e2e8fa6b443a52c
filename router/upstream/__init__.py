"""The workers as they are reached over HTTP: calls, polls, discovery, checks."""
