"""Random inputs for whatever reads what others wrote: clients, engines, and an earlier run.

`python -m tests.fuzz [TARGET ...] --inputs N`; `tests/load/test_fuzz.py` is the short form.
"""
