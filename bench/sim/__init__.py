"""Simulate the router's core with emulated engines in virtual time."""
