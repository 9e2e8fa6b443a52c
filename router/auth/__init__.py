"""Identifies clients by their keys and enforces their limits."""
