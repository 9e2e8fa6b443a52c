"""The F-score is what an admission gains in imbalance, and its best subset is found without trying all."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.policies.balance.f_score import HorizonScore, StepScore, best_subset, largest_score, step_score

loads = st.lists(st.integers(0, 1000), min_size=1, max_size=6)
weights = st.lists(st.integers(0, 500), min_size=1, max_size=9)


def imbalance(ranks: list[int]) -> int:
    """Return by how much all ranks together fall short of the fullest."""
    return sum(max(ranks) - load for load in ranks)


@given(ranks=loads, tokens=st.integers(0, 2000), data=st.data())
def test_one_step_scores_the_decrease_of_imbalance(ranks: list[int], tokens: int, data: st.DataObject) -> None:
    """With beta = G, F is by how much an admission lowers the imbalance of this step (BalanceRoute, eq. 1)."""
    place = data.draw(st.integers(0, len(ranks) - 1))
    margin = max(ranks) - ranks[place]
    after = [load + tokens * (number == place) for number, load in enumerate(ranks)]
    assert step_score(tokens, margin, len(ranks)) == imbalance(ranks) - imbalance(after)


@given(
    margins=st.lists(st.integers(0, 1000), min_size=1, max_size=6),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    alpha=st.sampled_from([0.5, 1.0]),
    beta=st.sampled_from([0.25, 1.0, 8.0, 48.0]),
    tokens=st.integers(0, 2000),
)
def test_a_horizon_scores_each_step(margins: list[int], gamma: float, alpha: float, beta: float, tokens: int) -> None:
    """F adds the reward and the penalty of every step, discounted (BalanceRoute, eq. 2)."""
    discounts = [gamma**step for step in range(len(margins))]
    reward = sum(alpha * discount * tokens for discount in discounts)
    penalty = sum(
        beta * discount * max(0, tokens - margin) for discount, margin in zip(discounts, margins, strict=True)
    )
    assert HorizonScore(margins, discounts, alpha, beta)(tokens) == pytest.approx(reward - penalty, abs=1e-6)


@given(margin=st.integers(0, 1000), beta=st.sampled_from([0.25, 1.0, 8.0, 48.0]), requests=weights)
def test_one_step_is_the_shortest_horizon(margin: int, beta: float, requests: list[int]) -> None:
    """The score of one step is that of a horizon of no further step."""
    step, horizon = StepScore(margin, beta), HorizonScore([margin], [1.0], 1.0, beta)
    assert [step(tokens) for tokens in requests] == [horizon(tokens) for tokens in requests]
    assert step.kink == horizon.kink


@given(
    margins=st.lists(st.integers(0, 600), min_size=1, max_size=4),
    beta=st.sampled_from([0.25, 1.0, 8.0, 48.0]),
    requests=weights,
)
def test_the_best_candidate_is_found_without_scoring_all(margins: list[int], beta: float, requests: list[int]) -> None:
    """The nearest to the kink on either side has the largest F of all; of equals the first to arrive goes."""
    candidates = sorted((tokens, arrival, tokens) for arrival, tokens in enumerate(reversed(requests)))
    for score in (StepScore(margins[0], beta), HorizonScore(margins, [1.0] * len(margins), 1.0, beta)):
        best = min(candidates, key=lambda candidate: (-score(candidate[0]), candidate[1]))
        assert largest_score(candidates, score) == best


@given(
    margins=st.lists(st.integers(0, 1500), min_size=1, max_size=6),
    requests=weights,
    most=st.integers(1, 9),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    beta=st.sampled_from([0.25, 1.0, 3.0, 48.0]),
)
def test_no_subset_is_better_than_the_one_found(
    margins: list[int], requests: list[int], most: int, gamma: float, beta: float
) -> None:
    """Of all subsets of at most so many requests, none has a larger F, for any horizon and any penalty."""
    score = HorizonScore(margins, [gamma**step for step in range(len(margins))], 1.0, beta)
    found = best_subset(requests, most, score)
    members = found.members(requests)
    assert 1 <= len(members) <= most
    assert sum(members) == found.total
    subsets = (subset for size in range(1, min(most, len(requests)) + 1) for subset in combinations(requests, size))
    best = max(score(sum(subset)) for subset in subsets)
    assert score(found.total) == pytest.approx(best, abs=1e-6)
