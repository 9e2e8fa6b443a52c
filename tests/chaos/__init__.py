"""Test that the router survives faults, overload, long runs and its own death, each by one command (`make chaos`).

Run from the root of the repository: `python -m tests.chaos` (faults), `python -m tests.chaos.restart` (kill -9),
`python -m tests.chaos.kills` (kill -9 of one process of several), `python -m tests.chaos.many_streams` (thousands of
streams), `python -m tests.chaos.pause` (processes that are stopped), `python -m tests.chaos.overload` (ten times more
than can be done), `python -m tests.chaos.soak` (a million calls), `python -m tests.chaos.handoffs` (faults between
prefill and decode).
The router and the workers are processes, and everything between them goes over real sockets.
"""
