"""Experiments of our own: policies, defaults, caches, windows."""
