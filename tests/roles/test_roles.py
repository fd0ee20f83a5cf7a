"""Actor and critic: each field of the configuration reaches the loss, against explicit loops.

One update of a tiny random model; its second mini-batch has shifted old log-probabilities, so that
both clips are active there. Gradients are tests/distributed's subject; the engine is not exercised.
"""

import math

import pytest
import torch

from tests import reference
from tests.cut import batch_of, mini_batches
from tests.dumped import MODEL
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.algorithm.agreement import LogprobsDiffer
from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.minibatches import make_microbatches
from vapo_megatron.roles.actor import Actor
from vapo_megatron.roles.advantages import with_policy_mask, with_positive_examples
from vapo_megatron.roles.critic import Critic

LENGTHS = [3, 5, 2, 4]
CORRECT = [True, False, False, True]
RATIOS = [1.0, 0.4, 3.0, 0.9, 6.0, 1.5, 0.4, 1.1, 6.0, 0.4, 1.0, 3.0, 0.7, 6.0]
"""exp(old_logprob - rollout_logprob) of each token; none of the third response's is in [.5, 5]."""
REFERENCE = [0.2, -0.1, 0.0, 0.4]
"""reference_logprob - old_logprob by token number modulo 4."""
SHIFT = [0.25, -0.3, 0.05]
"""logprob - old_logprob by token number modulo 3: ratios 1.284, 0.741 and 1.051."""


def batch(old_logprobs=None):
    generator = torch.Generator().manual_seed(5)
    num_tokens = sum(LENGTHS)
    noise = torch.randn(num_tokens, generator=generator)
    old = torch.zeros(num_tokens) if old_logprobs is None else old_logprobs
    return batch_of(
        torch.randint(0, 60, (num_tokens + 2 * len(LENGTHS),), generator=generator),
        [length + 2 for length in LENGTHS],
        LENGTHS,
        rewards=torch.ones(len(LENGTHS)),
        is_correct=torch.tensor(CORRECT),
        rollout_logprobs=old - torch.tensor(RATIOS).log(),
        old_logprobs=old_logprobs,
        reference_logprobs=old + torch.tensor([REFERENCE[t % 4] for t in range(num_tokens)]),
        values=noise.roll(1),
        advantages=noise,
        returns=noise.roll(2),
    )


def update_once(hf, algorithm):
    """Losses of the first and second mini-batch's update, and what they were computed from."""
    config = VapoConfig.model_validate(
        {
            "model": {"hf_path": str(hf), "dtype": "float32", "value_head_init_std": 0.1},
            "rollout": {"temperature": 0.7},
            "algorithm": algorithm,
            # So small that the second mini-batch sees the same model.
            "optimizer": {"actor_learning_rate": 1e-12, "critic_learning_rate": 1e-12},
        }
    )
    place = groups.initialize(config.parallel)
    shape = read_model_shape(hf)
    actor = Actor(shape, config, place, config.model.hf_path)
    critic = Critic(shape, config, place, config.model.hf_path)
    plan = [[0, 1], [2, 3]]  # two microbatches: counts must be the mini-batch's
    microbatches = make_microbatches(batch(), map(len, plan), multiple_of=1)
    logprobs, entropy = actor.compute_logprobs(microbatches)
    values = critic.compute_values(microbatches)
    shift = torch.tensor([SHIFT[t % 3] for t in range(len(logprobs))])
    same, shifted = (
        with_positive_examples(
            with_policy_mask(batch(old), config.algorithm, place)[0], config.algorithm
        )
        for old in (logprobs, logprobs - shift)
    )
    first = mini_batches(same, [plan], place)
    second = mini_batches(shifted, [plan], place)
    alone = actor.update(first)
    both = actor.update([*first, *second])
    of_critic = critic.update(first)
    # `both` is the mean over two mini-batches of which the first is known.
    of_second = {k: 2 * both[k] - alone[k] for k in ("actor/loss", "actor/policy_loss")}
    of_second |= {k: 2 * both[k] - alone[k] for k in alone if "clip_fraction" in k}
    return logprobs, entropy, values, alone, of_second, of_critic


def expected(algorithm, logprobs, entropy, shift):
    """(policy loss, whole loss) by loops."""
    logprobs, entropy = logprobs.tolist(), entropy.tolist()
    old = [x - shift * SHIFT[t % 3] for t, x in enumerate(logprobs)]
    mask = [1.0] * len(logprobs)
    correction = algorithm.get("sampler_correction", "none")
    if correction != "none":
        sampled = [x - math.log(k) for x, k in zip(old, RATIOS)]
        low, high = (0.5, 5.0) if correction == "icepop" else (0.0, 2.0)
        mask = reference.sampler_mask(
            old, sampled, mask, low=low, high=high, drops=correction == "icepop"
        )
    bounds = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    level = algorithm.get("loss_aggregation", "token")
    weights, count = reference.aggregation(mask, bounds, level)
    policy = policy_loss(algorithm, logprobs, old, weights, count)
    correct = [c for c, n in zip(CORRECT, LENGTHS) for _ in range(n)]
    imitated = [1.0] * len(correct)
    if algorithm.get("positive_lm_weight") == "advantage":
        pairs = zip(batch().returns.tolist(), batch().values.tolist())
        imitated = [max(r - v, 0.0) for r, v in pairs]
    nll = reference.positive_lm_loss(logprobs, imitated, correct, count=3 + 4)
    bonus = sum(w * e for w, e in zip(weights, entropy)) / count
    frozen = [x + REFERENCE[t % 4] for t, x in enumerate(old)]
    kl, _ = reference.reference_kl(logprobs, frozen, weights, count=count)
    whole = policy + algorithm.get("positive_lm_coef", 0.1) * nll
    whole += algorithm.get("kl_coef", 0.0) * kl
    return policy, whole - algorithm.get("entropy_coef", 0.0) * bonus


def policy_loss(algorithm, logprobs, old, weights, count):
    """By a loop; DIS and DPPO read the sampler's log-probabilities."""
    kind, advantages = algorithm.get("policy_loss", "ppo_clip"), batch().advantages.tolist()
    sampled = [x - math.log(k) for x, k in zip(old, RATIOS)]
    if kind == "ppo_clip":
        clips = {"clip_low": 0.2, "clip_high": 0.28}
        clips = {name: algorithm.get(name, value) for name, value in clips.items()}
        given = (logprobs, old, advantages, weights)
        return reference.policy_loss(*given, **clips, count=count)[0]
    given = (logprobs, sampled, advantages, weights)
    if kind == "dis":
        low, high = algorithm["dis_clip_low"], algorithm["dis_clip_high"]
        return reference.dis_loss(*given, low=low, high=high, count=count)[0]
    difference, cap = algorithm["dppo_max_difference"], algorithm.get("dppo_ratio_cap", 20.0)
    return reference.dppo_tv_loss(*given, difference=difference, cap=cap, count=count)[0]


DIS = {"policy_loss": "dis", "dis_clip_low": 0.35, "dis_clip_high": 6.0}
CASES = [
    {},
    {"clip_high": 0.2},
    {"clip_low": 0.3},
    {"loss_aggregation": "sample"},
    {"positive_lm_coef": 0.0},
    {"positive_lm_weight": "advantage"},
    {"entropy_coef": 0.3},
    {"entropy_coef": 0.3, "loss_aggregation": "sample", "positive_lm_coef": 1.0},
    {"kl_coef": 0.5},
    {"sampler_correction": "tis", "entropy_coef": 0.3, "kl_coef": 0.5},
    {"sampler_correction": "icepop", "entropy_coef": 0.3, "kl_coef": 0.5},
    {"sampler_correction": "icepop", "loss_aggregation": "sample"},
    # No ratio lies at an edge: 1 - .35 and 1 + 6, 1 - .05, 1 + 1.5.
    {**DIS, "kl_coef": 0.5},
    {**DIS, "dis_clip_low": 0.05, "loss_aggregation": "sample"},
    {**DIS, "dis_clip_high": 1.5},
    {"policy_loss": "dppo_tv", "dppo_max_difference": 0.01},
    {"policy_loss": "dppo_tv", "dppo_max_difference": 0.01, "dppo_ratio_cap": 1.2},
    {"policy_loss": "dppo_tv", "dppo_max_difference": 1.0, "loss_aggregation": "sample"},
]


@pytest.mark.parametrize("algorithm", CASES, ids=str)
def test_the_actors_loss(workers, tmp_path, algorithm):
    hf = write_tiny_hf(tmp_path, **MODEL)
    logprobs, entropy, _, first, second, _ = workers.run(1, update_once, hf, algorithm)[0]
    for found, shift in ((first, 0), (second, 1)):
        policy, whole = expected(algorithm, logprobs, entropy, shift)
        assert found["actor/policy_loss"] == pytest.approx(policy, abs=2e-6)
        assert found["actor/loss"] == pytest.approx(whole, abs=2e-6)
    assert first["actor/first_ratio_diff_max"] == 0


def test_every_case_is_told_apart(workers, tmp_path):
    hf = write_tiny_hf(tmp_path, **MODEL)
    logprobs, entropy, *_ = workers.run(1, update_once, hf, {})[0]
    losses = [expected(case, logprobs, entropy, 1)[1] for case in CASES]
    gaps = [abs(a - b) for i, a in enumerate(losses) for b in losses[:i]]
    assert min(gaps) > 1e-3, "the tolerance of the test above could not tell these fields apart"


@pytest.mark.parametrize("correction", ["none", "icepop"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_critics_loss(workers, tmp_path, clip, correction):
    """Over every token: what the sampler did to the policy's weights is nothing to the critic."""
    hf = write_tiny_hf(tmp_path, **MODEL)
    algorithm = {"value_clip": clip, "sampler_correction": correction}
    *_, values, _, _, metrics = workers.run(1, update_once, hf, algorithm)[0]
    data = batch()
    loss, _ = reference.value_loss(
        values.tolist(),
        data.returns.tolist(),
        [1.0] * len(values),
        count=len(values),
        old_values=data.values.tolist(),
        clip=clip,
    )
    assert metrics["critic/loss"] == pytest.approx(loss, abs=2e-6)
    unclipped = 0.5 * (values - data.returns).square().mean()
    assert (abs(loss - float(unclipped)) > 1e-3) == (clip is not None)


def test_the_critics_values_have_a_range(workers, tmp_path):
    hf = write_tiny_hf(tmp_path, **MODEL)
    head = workers.run(1, update_once, hf, {})[0][2]
    algorithm = {"value_range": [-1.0, 2.0]}
    *_, values, _, _, metrics = workers.run(1, update_once, hf, algorithm)[0]
    expected = [reference.ranged_value(z, -1, 2)[0] for z in head.tolist()]
    assert values.tolist() == pytest.approx(expected, abs=1e-6)
    returns, ones = batch().returns.tolist(), [1.0] * len(expected)
    loss, _ = reference.value_loss(expected, returns, ones, count=len(expected))
    assert metrics["critic/loss"] == pytest.approx(loss, abs=2e-6)


def changed_between(hf):
    """A logprob pass and an update that see different tokens."""
    config = VapoConfig.model_validate({"model": {"hf_path": str(hf), "dtype": "float32"}})
    place = groups.initialize(config.parallel)
    actor = Actor(read_model_shape(hf), config, place, str(hf))
    stale = batch(torch.full((sum(LENGTHS),), -4.0))
    try:
        actor.update(mini_batches(stale, [[[0, 1, 2, 3]]], place))
    except LogprobsDiffer as error:
        return str(error)
    return ""


def test_a_ratio_off_one_stops_the_run(workers, tmp_path):
    hf = write_tiny_hf(tmp_path, **MODEL)
    assert "differs from 1" in workers.run(1, changed_between, hf)[0]
