"""The gate that admits agent sessions, before any policy."""
