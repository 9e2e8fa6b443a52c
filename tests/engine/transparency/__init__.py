"""Compares what an engine answers directly and through the router, call by call."""
