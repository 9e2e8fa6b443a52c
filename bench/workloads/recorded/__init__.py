"""Recorded traces and sessions as workloads."""
