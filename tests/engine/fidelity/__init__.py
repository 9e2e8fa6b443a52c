"""Compares the emulated engines with the real ones under the same load: `python -m tests.engine.fidelity`."""
