"""Whitening and explained variance, whole and added up over shards.

Not exercised: the all-reduce between the two halves (tests/distributed).
"""

import pytest
import torch

from tests import reference
from vapo_megatron.algorithm.statistics import (
    explained_variance,
    explained_variance_from_moments,
    masked_sums,
    mean_and_std,
    moments,
    value_error_from_moments,
    whiten,
)


def test_explained_variance_golden_numbers():
    # returns 1, 3 (variance 1), errors 0, 1 (variance .25): 1 - .25 = .75
    assert float(explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))) == 0.75


def test_the_mean_error_that_explained_variance_does_not_see():
    """Over two shards; a value that is masked out does not count."""
    values, returns = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([-1.0, 3.0, 0.0])
    shards = [slice(0, 1), slice(1, 3)]
    mask = torch.tensor([True, True, False])
    sums = sum(moments(values[s], returns[s], mask[s]) for s in shards)
    error, spread = value_error_from_moments(sums)
    assert (float(error), float(spread)) == (0.5, 2.0)


def test_explained_variance_of_known_values():
    returns = torch.randn(1000)
    assert float(explained_variance(returns, returns)) == 1
    assert float(explained_variance(returns + 3, returns)) == pytest.approx(1, abs=1e-9)
    assert float(explained_variance(torch.full((1000,), 0.7), returns)) == pytest.approx(
        0, abs=1e-12
    )
    # 1 - Var(2R)/Var(R) = -3
    assert float(explained_variance(-returns, returns)) == pytest.approx(-3, abs=1e-6)


def test_explained_variance_equals_two_passes():
    returns = torch.randn(500) + 100
    values = returns + 0.5 * torch.randn(500)
    expected = reference.explained_variance(values.tolist(), returns.tolist())
    assert float(explained_variance(values, returns)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("level", [0.0, -1.0, 0.1, 1e6 + 0.3])
def test_constant_returns_have_nothing_to_explain(level):
    returns = torch.full((1000,), level)
    assert float(explained_variance(torch.randn(1000), returns)) == 0
    assert float(explained_variance(returns, returns)) == 0


def test_no_tokens():
    empty = torch.zeros(0)
    assert float(explained_variance(empty, empty)) == 0
    assert [float(x) for x in mean_and_std(masked_sums(empty, empty.bool()))] == [0, 0]


def test_moments_add_up_over_shards():
    values, returns, mask = torch.randn(300), torch.randn(300), torch.rand(300) < 0.7
    shards = [slice(0, 10), slice(10, 10), slice(10, 300)]
    added = sum(moments(values[s], returns[s], mask[s]) for s in shards)
    whole = explained_variance(values[mask], returns[mask])
    assert float(explained_variance_from_moments(added)) == pytest.approx(float(whole), abs=1e-12)
    weighted = moments(values, returns, mask * torch.rand(300).clamp(min=0.1))
    torch.testing.assert_close(weighted, added, rtol=1e-12, atol=1e-12)


def test_whitening_over_shards():
    advantages, mask = torch.randn(300) * 7 + 3, torch.rand(300) < 0.7
    sums = masked_sums(advantages[:90], mask[:90]) + masked_sums(advantages[90:], mask[90:])
    mean, std = mean_and_std(sums)
    assert int(sums[0]) == int(mask.sum())
    white = whiten(advantages, mean=mean, std=std)
    assert white.dtype == torch.float32
    assert float(white[mask].mean()) == pytest.approx(0, abs=1e-6)
    assert float(white[mask].std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert bool((white[~mask] != advantages[~mask]).all())


def test_whitening_of_equal_advantages_is_zero():
    advantages = torch.full((10,), 0.1)
    mean, std = mean_and_std(masked_sums(advantages, torch.ones(10, dtype=torch.bool)))
    assert whiten(advantages, mean=mean, std=std).abs().max() < 1e-7


def test_refusals():
    narrow, mask = torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bool)
    one = torch.tensor(1.0)
    for call in (
        lambda: whiten(narrow, mean=one, std=one),
        lambda: masked_sums(narrow, mask),
        lambda: masked_sums(narrow.float(), narrow),
        lambda: explained_variance(narrow, narrow.float()),
        lambda: moments(narrow.float(), narrow, mask),
    ):
        with pytest.raises(ValueError, match="dtype=torch.bfloat16"):
            call()
