"""Workloads, simulations and measurements of the router; run as `python -m bench <command>`."""
