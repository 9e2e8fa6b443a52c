"""Lengths drawn from truncated lognormals, and Zipf shares."""

from random import Random
from statistics import fmean, pstdev

import pytest

from bench.workloads.parts.lengths import Lengths, stratified, zipf


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths(1835, 742, most=4096),
        Lengths(190, 343, most=4096),
        Lengths(16, 9.9, most=45),
        Lengths(23_474, 6105, most=32_768),
        Lengths(48, 8, most=64),
        Lengths(136, 206, least=2, most=1021),
        Lengths(80, 23),
    ],
)
def test_mean_and_sd_hold_after_truncation(lengths: Lengths) -> None:
    """The drawn lengths lie within the bounds and have the mean and the standard deviation of the parameters."""
    random = Random(1)
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.03)
    assert pstdev(drawn) == pytest.approx(lengths.sd, rel=0.05)
    assert lengths.least <= min(drawn) < lengths.mean < max(drawn) <= lengths.most


def test_lengths_without_sd_are_equal() -> None:
    """A fixed length draws no random number."""
    random = Random(1)
    state = random.getstate()
    assert [Lengths(7).draw(random), Lengths(7.4).at(0.9)] == [7, 7]
    assert random.getstate() == state


@pytest.mark.parametrize("values", [(5.0, 1.0, 6, 9), (5.0, -1.0, 1, 9), (0.0, 0.0, 0, 9), (5.0, 90.0, 1, 9)])
def test_impossible_lengths_are_refused(values: tuple[float, float, int, int]) -> None:
    """The mean must lie within the bounds, and the deviation must be possible between them."""
    with pytest.raises(ValueError, match="lengths from"):
        Lengths(*values)


@pytest.mark.parametrize(("count", "exponent"), [(200, 0.0), (320, 1.1), (24, 0.0)])
def test_popular_items_do_not_shift_the_mean(count: int, exponent: float) -> None:
    """Weighted by popularity, the items' lengths have the distribution's mean and deviation."""
    shares = zipf(count, exponent)
    lengths = Lengths(1835, 742, most=4096)
    for seed in range(5):
        sizes = stratified(lengths, shares, Random(seed))
        mean = sum(size * share for size, share in zip(sizes, shares, strict=True))
        assert mean == pytest.approx(1835, rel=0.05)
        sd = sum((size - mean) ** 2 * share for size, share in zip(sizes, shares, strict=True)) ** 0.5
        assert sd == pytest.approx(742, rel=0.15)
    assert stratified(lengths, shares, Random(1)) != stratified(lengths, shares, Random(2))


def test_zipf_shares() -> None:
    """The k-th share is k^-exponent times the first, and all shares add up to one."""
    assert zipf(4, 0.0) == [0.25] * 4
    shares = zipf(10, 1.1)
    assert sum(shares) == pytest.approx(1.0)
    assert shares[3] / shares[0] == pytest.approx(4**-1.1)
