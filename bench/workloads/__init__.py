"""Workloads: who asks what, and when."""
