"""The workloads of the papers."""
