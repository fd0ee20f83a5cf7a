"""Each neighbour algorithm as a recipe: what it changes, its advantages and losses, and runs of it.

Advantages and losses are the package's, with the recipe's configuration, against arithmetic that is
written out here. Runs that sample are in tests/e2e/test_recipe_runs.py. Not exercised: whether a
recipe learns.
"""

import json
import os
import re
from math import exp, isnan, log, nan
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.dumped import GROUP_SIZE, MODEL, NUM_RESPONSES, dump, rollouts
from tests.dumped import config as dumped_config
from tests.weights.tiny_hf import write_tiny_hf
from tests.workers import free_port
from vapo_megatron.cli.train import main
from vapo_megatron.config import load_config
from vapo_megatron.config.techniques import algorithm_name

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples/configs"
TINY = [CONFIGS / "tiny.yaml"]
LARGE = [CONFIGS / "qwen2.5_base.yaml", CONFIGS / "qwen2.5_32b.yaml"]

PPO = {
    "value_pretraining_steps": 0, "lambda_actor": 0.95, "group_size": 1, "clip_high": 0.2,
    "loss_aggregation": "sample", "positive_lm_coef": 0.0,
}  # fmt: skip
GRPO = {
    "advantage_estimator": "grpo", "value_pretraining_steps": 0, "clip_high": 0.2,
    "loss_aggregation": "sample", "positive_lm_coef": 0.0, "overlong_buffer_tokens": 0,
}  # fmt: skip
CHANGES = {
    "vapo": {},
    "ppo": {**PPO, "lambda_critic": "same_as_actor"},
    "vc_ppo": {**PPO, "value_pretraining_steps": 100},
    "grpo": GRPO,
    "dr_grpo": {**GRPO, "advantage_estimator": "dr_grpo", "loss_aggregation": "constant"},
    "dapo": {
        "advantage_estimator": "grpo", "value_pretraining_steps": 0, "positive_lm_coef": 0.0,
        "overlong_filtering": True, "dynamic_sampling": True,
    },
    "orz": {
        "value_pretraining_steps": 0, "lambda_actor": 1.0, "clip_high": 0.2,
        "positive_lm_coef": 0.0, "critic_updates_per_step": 12, "critic_learning_rate": 5e-6,
        "incorrect": 0.0, "truncated_correct": 0.0, "overlong_buffer_tokens": 0,
    },
    "concise": {
        "value_pretraining_steps": 0, "lambda_actor": 0.95, "lambda_critic": "same_as_actor",
        "clip_high": 0.2, "value_clip": 0.2, "loss_aggregation": "sample", "positive_lm_coef": 0.0,
        "kl_coef": 0.01, "incorrect": -0.5, "overlong_buffer_tokens": 0,
    },
    "sao": {
        "value_pretraining_steps": 10, "length_adaptive_alpha": 1.5, "group_size": 1,
        "policy_loss": "dis", "positive_lm_coef": 0.0, "critic_updates_per_step": 2,
        "freeze_critic_attention": True, "critic_learning_rate": 5e-6, "overlong_buffer_tokens": 0,
    },
    "bpco": {
        "value_pretraining_steps": 15, "length_adaptive_alpha": 0.4, "group_size": 1,
        "policy_loss": "dppo_tv", "loss_aggregation": "sample", "positive_lm_coef": 0.0,
        "value_range": [-1.0, 1.0], "critic_learning_rate": 1e-5, "overlong_buffer_tokens": 0,
    },
    "pairwise_rl": {
        "critic_prompt_column": "critic_prompt", "verifier": "pairwise",
        "verifiers": {"pairwise": {"reference_column": "reference"}}, "from_score": [0.0, 1.0],
        "overlong_buffer_tokens": 0,
    },
    "sft": {
        "policy_loss": "none", "advantage_estimator": "none", "positive_lm_coef": 1.0,
        "value_pretraining_steps": 0, "group_size": 1, "response_column": "response",
        "answer_column": None, "overlong_buffer_tokens": 0,
    },
}  # fmt: skip
"""Fields that a recipe leaves other than the 32B base has them (VAPO, soft punishment)."""
WITHOUT_CRITIC = ("grpo", "dr_grpo", "dapo", "sft")


def recipe(name):
    return CONFIGS / f"algorithms/{name}.yaml"


def changed(base, name):
    before, after = (load_config(files).model_dump() for files in (base, [*base, recipe(name)]))
    return {
        field: value
        for section in before
        if section != "seed"
        for field, value in after[section].items()
        if before[section][field] != value
    }


NAMES = {
    "vapo": "VAPO", "ppo": "PPO", "vc_ppo": "VC-PPO", "grpo": "GRPO", "dr_grpo": "Dr.GRPO",
    "dapo": "DAPO", "orz": "Open-Reasoner-Zero", "concise": "PPO with group sampling",
    "sao": "SAO", "bpco": "BPCO", "pairwise_rl": "VAPO", "sft": "SFT",
}  # fmt: skip


@pytest.mark.parametrize("base", [TINY, LARGE], ids=["tiny", "32b"])
def test_a_run_is_called_by_its_recipe(base):
    found = {name: load_config([*base, recipe(name)]).model_dump() for name in CHANGES}
    assert {name: algorithm_name(config) for name, config in found.items()} == NAMES


def test_another_policy_loss_is_named_beside_the_algorithm():
    dis, dppo = ({"policy_loss": name} for name in ("dis", "dppo_tv"))
    for name, fields in (
        ("VAPO + DIS", dis),
        ("VAPO + DPPO", dppo),
        ("VAPO + DIS", {**dis, "clip_high": 0.2}),
        ("VAPO without group sampling + DIS", {**dis, "group_size": 1}),
        ("GRPO + DIS", {**dis, "advantage_estimator": "grpo"}),
        ("VAPO without clip-higher", {"clip_high": 0.2}),
        ("Value pretraining", {**dis, "stage": "value_pretraining"}),
        ("Fine-tuning on correct responses", {"policy_loss": "none"}),
    ):
        assert algorithm_name({"algorithm": fields}) == name


def test_every_recipe_is_here():
    assert {path.stem for path in (CONFIGS / "algorithms").iterdir()} == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_a_recipe_changes_what_it_says_and_nothing_else(name):
    assert changed(LARGE, name) == CHANGES[name]
    # The tiny base punishes no long response; all else is changed alike.
    expected = {k: v for k, v in CHANGES[name].items() if k != "overlong_buffer_tokens"}
    assert changed(TINY, name) == expected


@pytest.mark.parametrize("name", CHANGES)
def test_a_recipe_fits_a_base_whose_values_have_a_bias(name, tmp_path):
    (tmp_path / "biased.yaml").write_text("model: {value_head_bias: mean_return}\n")
    config = load_config([*TINY, tmp_path / "biased.yaml", recipe(name)])
    has_critic = "critic" in config.algorithm.trained_roles
    assert config.model.value_head_bias == ("mean_return" if has_critic else "none")


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("base", [TINY, LARGE], ids=["tiny", "32b"])
def test_a_recipe_is_planned_over_either_base(base, name, capsys):
    files = [part for file in [*base, recipe(name)] for part in ("--config", str(file))]
    # The tiny base model's directory is made by its run.
    model = ["model.hf_path=Qwen2.5-0.5B"] if base is TINY else []
    assert main([*files, *model, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    has_critic = name not in WITHOUT_CRITIC
    assert ("actor and critic, on" in plan) == has_critic
    assert ("critic_update  " in plan) == has_critic
    samples = name != "sft"
    for phase in ("generation", "logprobs", "sync", "vLLM: KV cache of"):
        assert bool(re.search(rf"^# +{phase} ", plan, re.M)) == samples, phase
    assert "no plan could be made" not in plan


# Two groups of three responses. Correct: 0, 2 (but cut off), 4, 5.
LENGTHS = [2, 1, 3, 2, 4, 1]
CORRECT = [True, False, True, False, True, True]
TRUNCATED = [False, False, True, False, False, False]
RATIOS = [[1.25, 0.9], [0.7], [1.1, 0.75, 1.5], [1.35, 0.6], [1.3, 0.95, 1.0, 0.7], [1.22]]
VALUES = [[0.5, -0.25], [0.75], [0.0, 0.5, -0.5], [0.25, 1.0], [-0.5, 0.125, 0.5, 0.25], [-1.0]]
REWARDS = [1.0, -1.0, -1.0, -1.0, 1.0, 1.0]
MAX_RESPONSE_TOKENS = 192
MINI_BATCH = range(6)
WHOLE = [0, 1, 3, 4, 5]
"""Responses that were not cut off."""

OLD_LOGPROB, REFERENCE_LOGPROB = -0.5, -0.75
SAMPLED_LOGPROBS = (-0.2, -1.2)
"""The sampler's, of tokens at even and odd places: DIS and DPPO drop some of either."""
WINS = [0.75, 0.25, 0.875, 0.0, 0.5, 1.0]
"""A pairwise judge's scores: at 1/2 and above a response is correct."""
ALPHA = {"sao": 1.5, "bpco": 0.4}
"""Of recipes that set it; the others get 1."""


def gae(i, lam, reward=None):
    """A_t = r_t + V_{t+1} - V_t + lam A_{t+1} of response i, gamma 1."""
    values, after, found = VALUES[i], 0.0, []
    for t in reversed(range(LENGTHS[i])):
        last = t == LENGTHS[i] - 1
        reward_t = (REWARDS[i] if reward is None else reward[i]) if last else 0.0
        after = reward_t + (0.0 if last else values[t + 1]) - values[t] + lam * after
        found.insert(0, after)
    return found


def group(divide):
    """The same for each token: (r - mean) / std, or r - mean."""
    found = []
    for i in MINI_BATCH:
        rewards = REWARDS[:3] if i < 3 else REWARDS[3:]
        std = stdev(rewards) + 1e-6 if divide else 1.0
        found.append([(REWARDS[i] - mean(rewards)) / std] * LENGTHS[i])
    return found


def surrogate(advantages, high):
    """-min(r A, clip(r, 0.8, 1 + high) A) of each token."""
    return [
        [-min(r * a, max(0.8, min(r, 1 + high)) * a) for r, a in zip(*pair, strict=True)]
        for pair in zip(RATIOS, advantages, strict=True)
    ]


def from_sampler(advantages, factor):
    """-f A log pi of each token, with f of pi's and the sampler's log-probabilities and A."""
    found, t = [], 0
    for ratios, some in zip(RATIOS, advantages, strict=True):
        found.append([])
        for r, a in zip(ratios, some, strict=True):
            new = OLD_LOGPROB + log(r)
            found[-1].append(-factor(new, SAMPLED_LOGPROBS[t % 2], a) * a * new)
            t += 1
    return found


def dis(new, sampled, advantage):
    """The ratio inside (0.7, 6), else 0."""
    ratio = exp(new - sampled)
    assert min(abs(ratio - edge) for edge in (0.7, 6)) > 1e-3
    return ratio if 0.7 < ratio < 6 else 0.0


def dppo(new, sampled, advantage):
    """The ratio, or 0 if the probability moved by more than 0.15 towards the advantage."""
    moved = exp(new) - exp(sampled)
    assert abs(abs(moved) - 0.15) > 1e-3
    kept = moved <= 0.15 if advantage > 0 else moved >= -0.15
    return exp(new - sampled) if kept else 0.0


def nll():
    """Of the tokens of correct responses."""
    of_correct = [r for i in MINI_BATCH if CORRECT[i] for r in RATIOS[i]]
    return -mean(OLD_LOGPROB + float(torch.tensor(r).log()) for r in of_correct)


def by_hand(name):
    """(advantages, returns, policy loss, whole loss) of the mini-batch."""
    if name in ("vapo", "pairwise_rl"):
        # A score is the reward, also of the response that was cut off.
        rewards = REWARDS if name == "vapo" else WINS
        # alpha is 1 here: lambda = 1 - 1/l. The critic's is 1: its targets are the rewards.
        advantages = [gae(i, 1 - 1 / LENGTHS[i], rewards) for i in MINI_BATCH]
        returns = [[rewards[i]] * LENGTHS[i] for i in MINI_BATCH]
        policy = sum(sum(x) for x in surrogate(advantages, 0.28)) / 13
        return advantages, returns, policy, policy + 0.1 * nll()
    if name in ("ppo", "vc_ppo"):
        advantages = [gae(i, 0.95) for i in MINI_BATCH]
        of_critic = advantages if name == "ppo" else [gae(i, 1.0) for i in MINI_BATCH]
        returns = [[a + v for a, v in zip(*p)] for p in zip(of_critic, VALUES)]
        policy = mean(mean(x) for x in surrogate(advantages, 0.2))
        return advantages, returns, policy, policy
    if name == "grpo":
        advantages = group(divide=True)
        # Rewards 1 -1 -1: mean -1/3, deviations 4/3 -2/3 -2/3, variance (16 + 4 + 4)/9/2 = 4/3.
        assert advantages[0][0] == pytest.approx((4 / 3) / (4 / 3) ** 0.5, abs=1e-5)
        policy = mean(mean(x) for x in surrogate(advantages, 0.2))
        return advantages, None, policy, policy
    if name == "dr_grpo":
        advantages = group(divide=False)
        thirds = [4, -2, -2, -4, 2, 2]
        assert [a[0] for a in advantages] == pytest.approx([n / 3 for n in thirds])
        policy = sum(sum(x) for x in surrogate(advantages, 0.2)) / (6 * MAX_RESPONSE_TOKENS)
        return advantages, None, policy, policy
    if name == "dapo":
        # The response that was cut off counts in its group's mean, and in nothing else.
        advantages = group(divide=True)
        of_tokens = surrogate(advantages, 0.28)
        policy = sum(sum(of_tokens[i]) for i in WHOLE) / (13 - 3)
        return advantages, None, policy, policy
    if name == "sft":
        # The LM loss is what VAPO adds a tenth of, and all that there is.
        return None, None, None, nll()
    if name in ALPHA:
        # alpha 1.5: lambda 1/3, 2/3, 7/9, 5/6 at 1 to 4 tokens; alpha .4: 0, 0, 1/6, 3/8.
        lambdas = [max(0.0, 1 - 1 / (ALPHA[name] * n)) for n in LENGTHS]
        expected = {"sao": [2 / 3, 1 / 3, 7 / 9], "bpco": [0, 0, 1 / 6]}[name]
        assert lambdas[:3] == pytest.approx(expected, abs=1e-15)
        advantages = [gae(i, lambdas[i]) for i in MINI_BATCH]
        returns = [[REWARDS[i]] * LENGTHS[i] for i in MINI_BATCH]
        of_tokens = from_sampler(advantages, dis if name == "sao" else dppo)
        dropped = sum(x == 0 for some in of_tokens for x in some)
        assert 2 <= dropped <= 8
        if name == "sao":
            policy = sum(sum(x) for x in of_tokens) / 13
        else:
            policy = mean(mean(x) for x in of_tokens)
        return advantages, returns, policy, policy
    if name == "concise":
        # The response that was cut off has the base's reward.
        rewards = [1.0, -0.5, -1.0, -0.5, 1.0, 1.0]
        advantages = [gae(i, 0.95, rewards) for i in MINI_BATCH]
        returns = [[a + v for a, v in zip(*p)] for p in zip(advantages, VALUES)]
        policy = mean(mean(x) for x in surrogate(advantages, 0.2))
        distances = [[REFERENCE_LOGPROB - OLD_LOGPROB - log(r) for r in some] for some in RATIOS]
        kl = mean(mean(exp(d) - d - 1 for d in some) for some in distances)
        return advantages, returns, policy, policy + 0.01 * kl
    assert name == "orz"
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    advantages = [gae(i, 1.0, rewards) for i in MINI_BATCH]
    returns = [[rewards[i]] * LENGTHS[i] for i in MINI_BATCH]
    policy = sum(sum(x) for x in surrogate(advantages, 0.2)) / 13
    return advantages, returns, policy, policy


def value_loss(returns):
    """0.5 (V - return)^2, mean over all tokens."""
    pairs = [p for i in MINI_BATCH for p in zip(VALUES[i], returns[i], strict=True)]
    return mean(0.5 * (v - r) ** 2 for v, r in pairs)


def batch_of(config):
    """The responses as the trainer has them before advantages, and their summary."""
    from vapo_megatron.data.batch import RolloutBatch, StepSummary
    from vapo_megatron.reward.shaping import shaped_reward
    from vapo_megatron.reward.verifier import Verdict

    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    count, lengths = int(bounds[-1]), torch.tensor(LENGTHS)
    limit = config.rollout.max_response_tokens
    truncated, is_correct = torch.tensor(TRUNCATED), torch.tensor(CORRECT)
    scores = WINS if config.reward.verifier == "pairwise" else [None] * len(CORRECT)
    verdicts = [
        Verdict("correct" if is_right else "wrong", score)
        for is_right, score in zip(CORRECT, scores, strict=True)
    ]
    facts = zip(verdicts, TRUNCATED, LENGTHS, strict=True)
    given = (config.reward, limit, config.reward.verifier)
    rewards = torch.tensor([shaped_reward(*fact, *given) for fact in facts])
    has_critic = "critic" in config.algorithm.trained_roles
    has_reference = "reference" in config.roles
    batch = RolloutBatch(
        tokens=torch.zeros(count + len(LENGTHS), dtype=torch.long),
        sequence_cu_seqlens=(bounds + torch.arange(len(bounds))).int(),
        cu_seqlens=bounds.int(),
        positions=torch.arange(len(LENGTHS)),
        rewards=rewards,
        is_correct=is_correct,
        truncated=truncated,
        rollout_logprobs=torch.tensor([SAMPLED_LOGPROBS[t % 2] for t in range(count)]),
        loss_mask=torch.ones(count, dtype=torch.bool),
        old_logprobs=torch.full((count,), OLD_LOGPROB),
        values=torch.tensor(sum(VALUES, [])) if has_critic else None,
        reference_logprobs=torch.full((count,), REFERENCE_LOGPROB) if has_reference else None,
    )
    statuses = torch.where(is_correct, 0, 1)
    zeros = torch.zeros_like(lengths)
    firsts = torch.tensor([0, 0, 0, 3, 3, 3])
    summary = StepSummary(zeros + 1, lengths, statuses, truncated, rewards, zeros, firsts, zeros)
    return summary, batch


def computed(files, overrides):
    """A worker's: advantages, returns and losses of one mini-batch of two microbatches."""
    from tests.cut import mini_batches
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.actor import Actor
    from vapo_megatron.roles.advantages import with_advantages, with_loss_mask
    from vapo_megatron.roles.critic import Critic
    from vapo_megatron.run.step_metrics import step_metrics

    config = load_config(files, overrides)
    place = groups.initialize(config.parallel)
    summary, batch = batch_of(config)
    batch = with_loss_mask(batch, config.algorithm)
    batch = with_advantages(summary, batch, config.algorithm, place)
    (mini_batch,) = mini_batches(batch, [[[0, 4, 2], [5, 1, 3]]], place)
    metrics = step_metrics(summary, batch, batch.old_logprobs, config.algorithm, place)

    def losses(model, outputs):
        """Of a role whose model returns what it is given."""
        model.config = config
        model._values = lambda output, microbatch: output
        found = []
        for microbatch in mini_batch.microbatches:
            output = torch.tensor(sum((outputs[i] for i in microbatch.batch.positions), []))
            loss, metrics = model._loss(mini_batch, output, microbatch)
            found.append([float(loss), float(metrics.get("policy_loss", nan))])
        return [sum(one) for one in zip(*found)]

    logprobs = [[OLD_LOGPROB + float(torch.tensor(r).log()) for r in some] for some in RATIOS]

    with mock.patch.object(Actor, "logprobs", lambda actor, output, *_, **__: (output, None)):
        whole, policy = losses(Actor.__new__(Actor), logprobs)
    of_critic, updates, values = None, [], None
    if "critic" in config.algorithm.trained_roles:
        critic = Critic.__new__(Critic)
        critic.config, critic.ranks = config, SimpleNamespace(cp_size=1)
        three = SimpleNamespace(predicting=torch.arange(3))
        values = critic._values(torch.tensor([-1.0, 0.0, 3**0.5]), three).tolist()
        of_critic, _ = losses(critic, VALUES)
        critic.trained = Counted(updates)
        critic.update([mini_batch])
    return batch, policy, whole, of_critic, updates, values, metrics


class Counted:
    """In the place of a trained model: notes the learning rate of each update."""

    def __init__(self, rates):
        self.rates = rates

    @property
    def num_updates(self):
        """So far."""
        return len(self.rates)

    def update(self, mini_batch, loss_function, learning_rate):
        """Note it."""
        self.rates.append(learning_rate)
        return {"grad_norm": torch.tensor(1.0)}


@pytest.mark.parametrize("name", CHANGES)
def test_advantages_and_losses_by_hand(workers, name):
    overrides = [
        "parallel.world_size=1", "parallel.tensor_model_parallel_size=1",
        "algorithm.responses_per_step=6", "algorithm.mini_batch_size=6",
    ]  # fmt: skip
    overrides += ["algorithm.length_adaptive_alpha=1"] * (name not in ALPHA)
    if CHANGES[name].get("group_size") != 1:
        overrides.append("algorithm.group_size=3")
    files = [*TINY, recipe(name)]
    (found,) = workers.run(1, computed, files, overrides)
    batch, policy, whole, of_critic, updates, values, metrics = found
    advantages, returns, expected_policy, expected_whole = by_hand(name)
    if name == "sft":
        assert (
            batch.advantages is None and isnan(policy) and "algorithm/advantage_mean" not in metrics
        )
    else:
        assert batch.advantages.tolist() == pytest.approx(sum(advantages, []), abs=1e-6)
        # Sums of 13 float32 terms of at most 2.
        assert policy == pytest.approx(expected_policy, abs=1e-7)
    assert whole == pytest.approx(expected_whole, abs=1e-7)
    if returns is None:
        assert batch.returns is None and of_critic is None
        assert not [n for n in metrics if n.startswith("critic/") or "lambda" in n]
        return
    assert batch.returns.tolist() == pytest.approx(sum(returns, []), abs=1e-6)
    assert of_critic == pytest.approx(value_loss(returns), rel=2e-6)
    rates = {"orz": [5e-6] * 12, "sao": [5e-6] * 2, "bpco": [1e-5]}
    assert updates == rates.get(name, [5e-4])
    # -1 + 2 (1/2 + atan(z) / pi) of z = -1, 0, sqrt 3: -1/2, 0, 2/3.
    assert values == pytest.approx([-0.5, 0, 2 / 3] if name == "bpco" else [-1, 0, 3**0.5])
    assert {"critic/explained_variance", "algorithm/lambda_actor_mean"} <= set(metrics)


def test_no_two_recipes_compute_the_same():
    found = [by_hand(name) for name in CHANGES]
    losses = [whole for *_, whole in found]
    gaps = [abs(a - b) for i, a in enumerate(losses) for b in losses[:i]]
    # PPO and VC-PPO differ in the critic's targets alone.
    assert sorted(gap < 1e-3 for gap in gaps) == [False] * (len(gaps) - 1) + [True]
    ppo, vc_ppo = found[1], found[2]
    assert abs(value_loss(ppo[1]) - value_loss(vc_ppo[1])) > 1e-3


def trained(files, overrides, dumped, ports):
    """A whole run from a dump, then the gradients of its first step; a worker's function."""
    from vapo_megatron.cli.gradient_check import collect_gradients, describe_gradients
    from vapo_megatron.training.loop import VapoTrainer

    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    config = load_config(files, [*overrides, "parallel.offload=true"])
    with VapoTrainer(config, dumped) as trainer:
        trainer.fit()
    os.environ.update(MASTER_PORT=str(ports[1]))
    out = Path(config.logging.run_dir, "gradients")
    collect_gradients(load_config(files, overrides), dumped, 1, out)
    return describe_gradients(out)


def test_a_run_without_a_critic(workers, tmp_path):
    """By turns, on two data-parallel ranks, whose groups are apart."""
    hf = write_tiny_hf(tmp_path / "model", **MODEL)
    workers.run(2, dump, tmp_path / "replay", [1, 2], 2)
    base, run_dir = tmp_path / "base.yaml", tmp_path / "run"
    sections = {
        "parallel": {"world_size": 2},
        "logging": {"run_dir": str(run_dir), "progress": "off"},
        "optimizer": {"actor_learning_rate": 1e-2},
    }
    base.write_text(dumped_config(hf, **sections).to_yaml())
    overrides = ["algorithm.overlong_filtering=true"]
    files, ports = [base, recipe("grpo")], [free_port(), free_port()]
    gradients = workers.run(2, trained, files, overrides, tmp_path, ports)[0]
    assert "actor loss" in gradients and "critic loss" not in gradients
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["actor/grad_norm"] > 0 and rows[-1]["actor/first_ratio_diff_max"] < 1e-4
    assert not [name for name in rows[-1] if "critic" in name or "lambda" in name]
    held = [p.name for p in (run_dir / "checkpoints/step_000002").iterdir() if p.is_dir()]
    assert held == ["actor"]
    # The first step's advantages from the dumped rewards; tokens that were cut off are left out.
    tokens = []
    for start in range(0, NUM_RESPONSES, GROUP_SIZE):
        members = rollouts(1)[start : start + GROUP_SIZE]
        rewards = [s.reward for s in members]
        for s in members:
            advantage = (s.reward - mean(rewards)) / (stdev(rewards) + 1e-6)
            tokens += [] if s.rollout.truncated else [advantage] * len(s.rollout.token_ids)
    assert any(s.rollout.truncated for s in rollouts(1))
    assert rows[1]["algorithm/advantage_mean"] == pytest.approx(mean(tokens), abs=1e-6)
    report = (run_dir / "report.html").read_text()
    for technique in ("Decoupled GAE", "Length-adaptive GAE"):
        assert re.search(rf'class="off"><div class="head"><b>\d</b><h3>{technique}', report)


@pytest.mark.parametrize("held,asked", [("actor", "actor critic"), ("actor critic", "actor")])
def test_a_checkpoint_of_other_roles_is_refused(tmp_path, held, asked):
    from vapo_megatron.errors import CheckpointError
    from vapo_megatron.run.checkpoint.load import load_run

    (tmp_path / "step_000002").mkdir()
    state = {"step": 2, "num_updates": dict.fromkeys(held.split(), 4), "run": {}}
    (tmp_path / "step_000002/state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError) as error:
        load_run(tmp_path / "step_000002", dict.fromkeys(asked.split()))
    told = f"holds {held}, but this configuration trains {asked} (algorithm."
    assert told.replace("actor critic", "actor and critic") in str(error.value)
    for field in ("advantage_estimator", "logging.run_dir"):
        assert field in str(error.value)
    assert "\n" not in str(error.value)
