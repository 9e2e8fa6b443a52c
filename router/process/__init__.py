"""Composition roots: what each process of the router consists of."""
