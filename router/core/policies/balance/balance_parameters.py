"""The parameters of policies that balance ranks which step together. The settings read them."""

from dataclasses import dataclass
from typing import Literal

from router.core.policies.balance.f_score import MOST_COMBINED
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters


@dataclass(frozen=True, slots=True)
class BalanceRouteParameters:
    """What the paper leaves open, for both algorithms."""

    candidates: int = 64
    """K: how many waiting requests stage 2 chooses from."""
    candidates_by: Literal["arrival", "largest", "smallest"] = "arrival"
    """Which waiting requests the candidates are. All but `arrival` can starve requests of other sizes."""
    threshold: int = 0
    """tau: stage 1 applies while more places than this are free in all. 0: always."""
    fill_candidates: int = 64
    """How many of the oldest waiting requests stage 1 chooses from; 0: all, as in the paper, which starves some."""
    subset: int = 1
    """The most requests that stage 2 chooses at once; 1: one by one."""

    def __post_init__(self) -> None:
        if self.candidates < 1 or self.subset < 1:
            raise ValueError("candidates and subset must be positive")
        if min(self.threshold, self.fill_candidates) < 0:
            raise ValueError("threshold and fill_candidates must not be negative")
        if self.subset > 1 and self.candidates > MOST_COMBINED:
            raise ValueError(f"with a subset of more than 1, candidates must be at most {MOST_COMBINED}")


@dataclass(frozen=True, slots=True)
class Br0Parameters(BalanceRouteParameters):
    """BR-0."""

    beta: float = 48.0
    """Penalty for each token by which a rank would exceed the fullest one; 0: the number of ranks, as in the paper."""
    bypass: bool = False
    """Send each request, in order of arrival, to the best rank with room, without a choice among waiting requests
    (Appendix D.6)."""

    def __post_init__(self) -> None:
        BalanceRouteParameters.__post_init__(self)
        if self.beta < 0:
            raise ValueError("beta must not be negative")


@dataclass(frozen=True, slots=True)
class BrhParameters(BalanceRouteParameters):
    """BR-H."""

    horizon: int = 48
    """H: how many decode steps are looked ahead."""
    discount: float = 0.9
    """gamma: the weight of each step of the horizon, relative to the step before."""
    alpha: float = 1.0
    """Reward for each token that is admitted."""
    beta: float = 48.0
    """Penalty for each token by which a rank would exceed the fullest one; 0: the number of ranks, as in BR-0."""
    predictor: Literal["none", "survival", "exact_match", "oracle"] = "survival"
    """What predicts the end of running answers: nothing, past answers, past answers to the same prompt, or, in
    simulations only, the truth."""
    refresh: int = 8
    """A running answer's end is predicted again after this many tokens."""
    gate: float = 0.5
    """Predict that an answer ends within the horizon if the probability of that is at least this."""

    def __post_init__(self) -> None:
        BalanceRouteParameters.__post_init__(self)
        if self.horizon < 0 or self.refresh < 1:
            raise ValueError("horizon must not be negative, and refresh positive")
        if not 0 < self.discount <= 1 or not 0 <= self.gate <= 1:
            raise ValueError("discount must be above 0 and at most 1, and gate from 0 to 1")
        if self.alpha <= 0 or self.beta < 0:
            raise ValueError("alpha must be positive, and beta not negative")


@dataclass(frozen=True, slots=True)
class DlpmBalanceParameters(DlpmHomeParameters):
    """DLPM from one pool, with balance among ranks that step together."""

    cached_first: bool = False
    """While many clients wait, let them take turns in rounds. Among ranks that step together, requests still go in the
    order of their clients' last turns."""
    patience: int = 64
    """How many other requests may go ahead of one that could go. After that it goes next, to the lightest rank, or room
    is kept for it."""
    home_loss: int = 256
    """A rank that would lose at most this many cached tokens of a prefix may take it. Higher: better balance."""
    candidates: int = 16
    """How many of the oldest requests that may go are compared. Higher: better balance, longer waits."""
    beta: float = 48.0
    """Penalty for each token by which a rank would exceed the fullest one."""

    def __post_init__(self) -> None:
        DlpmHomeParameters.__post_init__(self)
        if self.candidates < 1:
            raise ValueError("candidates must be positive")
        if self.beta < 0:
            raise ValueError("beta must not be negative")
