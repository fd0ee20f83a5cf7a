"""Numbers that tests of other libraries expect, row by row of peers.json.

Not exercised: that counts are summed over ranks (tests/distributed).
"""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.cut import batch_of
from vapo_megatron.algorithm.off_policy_loss import dis_policy_loss, dppo_tv_policy_loss
from vapo_megatron.algorithm.policy_loss import clipped_policy_loss
from vapo_megatron.algorithm.positive_lm_loss import positive_lm_loss
from vapo_megatron.algorithm.reduction import global_mean
from vapo_megatron.algorithm.reference_kl import reference_kl
from vapo_megatron.data.microbatch import make_microbatch

ROWS = json.loads((Path(__file__).parent / "peers.json").read_text())
WIDE = {"dtype": torch.float64}
POLICY_LOSSES = {
    "ppo_clip": (clipped_policy_loss, {"clip_low": 0.2, "clip_high": 0.28}),
    "dis": (dis_policy_loss, {"low": 0.3, "high": 5.0}),
    "dppo_tv": (dppo_tv_policy_loss, {"max_difference": 0.2, "ratio_cap": 20.0}),
}


def test_every_row_has_a_test():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert ROWS.keys() - {"note"} <= tested


def test_nll_global():
    """Two microbatches with one count; summed without it, they would be 4."""
    row = ROWS["nll_global"]
    parts = [torch.tensor(x, **WIDE, requires_grad=True) for x in row["logprobs"]]
    count = sum(map(len, parts))
    losses = []
    for x in parts:
        everything = torch.full((len(x),), row["all_correct"])
        losses.append(positive_lm_loss(x, everything, everything, num_positive_tokens=count))
    sum(losses).backward()
    assert sum(losses).item() == row["global_normalisation"]
    assert {g for x in parts for g in x.grad.tolist()} == {row["gradient"]}
    alone = [positive_lm_loss(x, x < 0, x < 0, num_positive_tokens=len(x)).item() for x in parts]
    assert sum(alone) == row["wrong_per_microbatch_sum"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_ratio_extremes(name, dtype):
    """Together with a token that is trained on, whose loss and gradient are as without them."""
    function, bounds = POLICY_LOSSES[name]
    extremes = [float(x) for x in ROWS["ratio_extremes"]["log_ratio"]]

    def of(log_ratios, advantages, mask):
        logprobs = torch.tensor(log_ratios, dtype=dtype).sub(1).requires_grad_()
        old = torch.full_like(logprobs, -1.0).detach()
        advantages = torch.tensor(advantages, dtype=dtype)
        loss, metrics = function(
            logprobs, old, advantages, torch.tensor(mask), **bounds, num_tokens=4
        )
        loss.backward()
        return loss.item(), logprobs.grad.tolist(), metrics

    loss, gradient, metrics = of(extremes, [0.0] * 5, [True] * 5)
    assert loss == 0 and gradient == [0.0] * 5
    assert all(metric.isfinite() for metric in metrics.values())
    one, (slope,), plain = of([0.1], [2.0], [True])
    loss, gradient, _ = of([0.1, *extremes], [2.0] + [0.0] * 5, [True] * 6)
    assert loss == one != 0 and gradient == [slope] + [0.0] * 5
    loss, gradient, masked = of([0.1, *extremes], [2.0] + [math.nan] * 5, [True] + [False] * 5)
    assert loss == one and gradient == [slope] + [0.0] * 5 and masked == plain


@pytest.mark.parametrize("log_ratio", [90.0, 1000.0, math.inf])
def test_a_ratio_that_overflows_above_the_upper_clip(log_ratio):
    """Its loss is that of the clip, and its gradient 0, as of a ratio that does not overflow."""
    found = []
    for x in (2.0, log_ratio):
        logprobs = torch.tensor([x], requires_grad=True)
        loss, _ = clipped_policy_loss(
            logprobs, torch.zeros(1), torch.ones(1), torch.tensor([True]),
            clip_low=0.2, clip_high=0.28, num_tokens=1,
        )  # fmt: skip
        loss.backward()
        found.append((loss.item(), logprobs.grad.item()))
    assert found[0] == found[1] and found[0][1] == 0


@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
def test_the_reference_may_be_far_away(log_ratio):
    logprobs = torch.zeros(1, requires_grad=True)
    loss, _ = reference_kl(logprobs, torch.tensor([log_ratio]), torch.tensor([True]), num_tokens=1)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


def microbatch(lengths, tokens, **cut):
    """Sequences whose first token is the prompt."""
    batch = batch_of(torch.tensor(tokens), lengths, [n - 1 for n in lengths])
    return make_microbatch(batch, **cut)


def test_cp_layout():
    row = ROWS["cp_layout"]
    size, lengths = row["cp"], row["lengths"]
    tokens = list(range(1, 1 + sum(lengths)))
    parts = [microbatch(lengths, tokens, cp_size=size, cp_rank=rank) for rank in range(size)]
    for part in parts:
        assert part.model_cu_seqlens.diff().tolist() == row["padded"]
    assert [len(part.tokens) for part in parts] == row["tokens_per_rank"]
    held = [token for part in parts for token in part.tokens.tolist() if token]
    assert sorted(held) == tokens


def test_packed_shift():
    row = ROWS["packed_shift"]
    packed = row["packed"]
    lengths = torch.tensor(row["cu_seqlens"]).diff().tolist()
    found = microbatch(lengths, packed)
    shifted = torch.zeros(len(packed), dtype=torch.long)
    shifted[found.predicting] = found.targets
    assert shifted.tolist() == row["boundary_safe"] != row["naive_roll"]


def test_global_token_mean():
    """Every partition has the same gradient; its value is a sum of quotients, each rounded."""
    row = ROWS["global_token_mean"]
    mask, expected = torch.tensor(row["mask"]).bool(), (1 + 5 + 6 + 7 + 13 + 15) / 6
    for partition in row["partitions"]:
        x = torch.arange(1, 17, **WIDE).view(4, 4).requires_grad_()
        total = sum(global_mean(x[rows], mask[rows], int(mask.sum())) for rows in partition)
        total.backward()
        assert torch.equal(x.grad, mask / torch.tensor(6, **WIDE))
        assert abs(total.item() - expected) <= math.ulp(expected)


def test_weighted_ce():
    row = ROWS["weighted_ce"]
    logprobs, mask = torch.tensor(row["logprobs"], **WIDE), torch.tensor(row["mask"]).bool()
    everything = torch.ones_like(mask)
    nll = positive_lm_loss(logprobs, mask, everything, num_positive_tokens=row["scale"])
    assert nll.item() == pytest.approx(row["nll"], abs=1e-15)
    weights = torch.tensor(row["weights"], **WIDE)
    of = {"num_positive_tokens": row["scale2"]}
    for arguments in ((weights, everything), (mask, everything)):
        more = {} if arguments[0] is weights else {"weights": weights}
        nll = positive_lm_loss(logprobs, *arguments, **of, **more)
        assert nll.item() == pytest.approx(row["nll2"], abs=1e-15)


def test_token_sum():
    row = ROWS["token_sum"]
    loss, mask = torch.tensor(row["loss"], **WIDE), torch.tensor(row["mask"]).bool()
    assert global_mean(loss, mask, 1).item() == row["sum"]
