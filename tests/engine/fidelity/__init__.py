"""The emulated engines beside the real ones, under the same load: `python -m tests.engine.fidelity`."""
