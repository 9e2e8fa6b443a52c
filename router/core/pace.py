"""How fast one worker is, as far as the router has seen."""

FIRST_SECONDS_PER_TOKEN = 1e-4
"""Of prefill, before anything was learned: between what 7B models need on an A100 and on an A6000."""


class Pace:
    """One worker's prefill and service, measured."""

    def __init__(self) -> None:
        self._seconds_per_token = FIRST_SECONDS_PER_TOKEN

    def prefill_seconds(self, tokens: int) -> float:
        """How long the worker takes over so many uncached input tokens, when nothing else waits."""
        return tokens * self._seconds_per_token

    @property
    def rate(self) -> float | None:
        """Cost units served in a second during which it had work; None before anything was learned."""
        return None
