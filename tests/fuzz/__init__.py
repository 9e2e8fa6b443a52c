"""Random inputs for all parsers of untrusted data: from clients, from engines, and from the state file.

`python -m tests.fuzz [TARGET ...] --inputs N`; `tests/load/test_fuzz.py` is a short run.
"""
