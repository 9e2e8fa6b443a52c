"""Workloads: which client sends which requests, and when."""
