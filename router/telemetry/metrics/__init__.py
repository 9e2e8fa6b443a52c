"""Prometheus metrics: of requests, hand-offs, the present state, fronts and other parts, and their text format."""
