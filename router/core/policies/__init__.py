"""The scheduling policies."""
