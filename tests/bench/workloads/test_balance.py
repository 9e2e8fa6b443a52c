"""The loads of a decode tier have the published lengths."""

from itertools import islice
from math import log
from random import Random
from statistics import correlation, fmean, stdev

import pytest

from bench.workloads.papers.balance import BALANCE, BfIo, LongContexts

COUNT = 20_000


def test_long_contexts_are_lognormal() -> None:
    """Means and the deviations of the logarithms are those of the load, within its limits."""
    random = Random(1)
    prompts, answers = zip(*(LongContexts(rate=1.0).sizes(random) for _ in range(COUNT)), strict=True)
    assert fmean(prompts) == pytest.approx(6000, rel=0.03)
    assert fmean(answers) == pytest.approx(500, rel=0.03)
    assert 32 <= min(prompts) < max(prompts) <= 64_000
    assert 1 <= min(answers) < max(answers) <= 8192
    # Truncation takes a part of either tail, and so of the deviation.
    assert stdev(map(log, prompts)) == pytest.approx(1.1, rel=0.05)
    assert stdev(map(log, answers)) == pytest.approx(1.3, rel=0.06)


def test_bf_io_is_normal() -> None:
    """Without truncation, lengths have the published means, deviations and correlation."""
    random, load = Random(1), BfIo(rate=1.0, input=50_000, output=50_000)
    prompts, answers = zip(*(load.sizes(random) for _ in range(COUNT)), strict=True)
    assert [fmean(prompts), stdev(prompts)] == pytest.approx([50_000, 2600], rel=0.02)
    assert [fmean(answers), stdev(answers)] == pytest.approx([50_000, 700], rel=0.02)
    assert correlation(prompts, answers) == pytest.approx(-0.1, abs=0.02)
    published = BfIo(rate=1.0)
    assert all(min(published.sizes(random)) >= 1 for _ in range(COUNT))


@pytest.mark.parametrize("name", BALANCE)
def test_calls_have_prompts_of_their_own(name: str) -> None:
    """Eight clients call, and no two prompts begin alike."""
    clients = BALANCE[name].clients(0)
    calls = [call for client in clients for call in islice(client.calls, 5)]
    assert len(clients) == 8
    assert len({call.prompt.tokens[0] for call in calls}) == len(calls)
    assert all(call.output_tokens == call.output_limit for call in calls)
