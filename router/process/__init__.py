"""Composition roots: each module builds one process of the router from its parts."""
