"""Experiments with the sessions of coding agents."""
