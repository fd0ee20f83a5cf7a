"""The reference that every layout is compared with: one process, float64, no code of the package.

transformers' Qwen2, one unpacked sequence at a time, norms and softmax really in float64
(tests/models/float64.py). The losses and their derivatives with respect to the model's outputs are
the loops of tests/reference.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import reference
from tests.distributed.problem import (
    ACTOR_LOSSES,
    CLIP_GRAD,
    CRITIC_LOSSES,
    GAE,
    LEARNING_RATE,
    LENGTHS,
    OPTIMIZER,
    SEQUENCES,
    TEMPERATURE,
    ActorLoss,
    CriticLoss,
    Problem,
    places,
    turns,
)
from tests.models.float64 import (
    by_hf_name,
    chosen_routes,
    load_float64,
    replay_routes,
    smallest_margin,
)


class Expected(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]
    """float64, by HF name."""


class Reference(NamedTuple):
    outputs: Tensor
    """float64: log-probabilities and entropies [T, 2], or values [T]."""
    losses: dict[str, Expected]
    grad_norm: float
    """Of the last loss."""
    updates: dict[str, Tensor]
    """float64, by HF name: what one update with the last loss adds to the parameter."""
    advantages: dict[str, Tensor]
    """[unit of GAE]: float64 [2, T], of a critic: advantages, whitened, and returns."""


def hidden_states(model: Any, problem: Problem) -> Tensor:
    """float64 [T, H]: the model's output at the position before each response token."""
    states = []
    for i, tokens in enumerate(problem.tokens.split(SEQUENCES)):
        hidden = model.model(tokens[None], use_cache=False).last_hidden_state[0]
        states.append(hidden[[place - 1 for place in places(i)]])
    return torch.cat(states)


def actor_outputs(model: Any, problem: Problem) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy), float64 [T], of the distribution at TEMPERATURE."""
    logp = torch.log_softmax(model.lm_head(hidden_states(model, problem)) / TEMPERATURE, -1)
    picked = logp.gather(1, problem.targets[:, None])[:, 0]
    return picked, -(logp.exp() * logp).sum(-1)


def load_policy(directory: str) -> Any:
    """load_float64, with the adapters in the directory, if there are any, by peft."""
    model = load_float64(directory)
    if not Path(directory, "adapter").exists():
        return model
    from peft import PeftModel

    # It puts its layers into the model itself, and freezes all else.
    PeftModel.from_pretrained(model, directory + "/adapter", is_trainable=True)
    trained = _trained(model)
    assert trained and all(".lora_" in n and p.dtype == torch.float64 for n, p in trained.items())
    return model


def actor_reference(directory: str, problem: Problem) -> Reference:
    """Everything that is compared of an actor."""
    model = load_policy(directory)
    logprobs, entropy = actor_outputs(model, problem)
    found = {}
    for name, settings in ACTOR_LOSSES.items():
        loss, by_logprob, by_entropy = actor_loss(
            logprobs.tolist(), entropy.tolist(), problem, settings
        )
        gradients = _gradients([logprobs, entropy], [by_logprob, by_entropy], model)
        found[name] = Expected(loss, gradients)
    parameters = by_hf_name(_trained(model))
    return _reference(torch.stack([logprobs, entropy], -1), found, parameters)


def routing_margin(directory: str, problem: Problem) -> float:
    """See smallest_margin; of all the problem's tokens."""
    model = load_float64(directory)
    with torch.no_grad():
        hidden_states(model, problem)
    return smallest_margin(model)


class Replayed(NamedTuple):
    routes: Tensor
    """uint8 [layers with experts, tokens of all sequences, experts per token]"""
    outputs: Tensor
    """float64 [T, 2], see Reference."""
    expected: Expected


def replayed(directory: str, problem: Problem, loss: str) -> Replayed:
    """Of an actor whose routers point the other way, but choose as they did before."""
    model = load_float64(directory)
    with torch.no_grad():
        hidden_states(model, problem)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.neg_()
    routes = torch.stack(chosen_routes(model)).to(torch.uint8)
    replay_routes(model)
    outputs = actor_outputs(model, problem)
    value, *by_output = actor_loss(
        *(x.tolist() for x in outputs), problem, ACTOR_LOSSES[loss]
    )  # fmt: skip
    expected = Expected(value, _gradients(list(outputs), by_output, model))
    return Replayed(routes, torch.stack(outputs, -1).detach(), expected)


def load_critic(directory: str) -> Any:
    """The same with the score head in the output projection's place."""
    model = load_policy(directory)
    weight = load_file(directory + "/model.safetensors")["score.weight"].double()
    model.lm_head = torch.nn.Linear(weight.shape[1], 1, bias=False, dtype=torch.float64)
    model.lm_head.weight.data = weight
    return model


def critic_values(model: Any, problem: Problem) -> Tensor:
    """V before each response token, float64 [T]."""
    return model.lm_head(hidden_states(model, problem))[:, 0]


def critic_reference(directory: str, problem: Problem) -> Reference:
    """Everything that is compared of a critic."""
    model = load_critic(directory)
    values = critic_values(model, problem)
    found = {}
    for name, settings in CRITIC_LOSSES.items():
        loss, by_value = critic_loss(values.tolist(), problem, settings)
        gradients = _gradients([values], [by_value], model)
        gradients["score.weight"] = gradients.pop("lm_head.weight")
        found[name] = Expected(loss, gradients)
    parameters = by_hf_name(_trained(model))
    parameters["score.weight"] = parameters.pop("lm_head.weight")
    advantages = {unit: _advantages(values.tolist(), problem, unit) for unit in GAE}
    return _reference(values, found, parameters, advantages)


def _advantages(values: list[float], problem: Problem, unit: str) -> Tensor:
    """GAE with a lambda for each response, over its tokens or its turns; observations are in none.

    A turn has the value before its first token and the sum of its tokens' rewards.
    """
    bounds, rewards = problem.bounds, problem.earned.tolist()
    for end, is_correct in zip(bounds[1:], problem.is_correct.tolist()):
        rewards[end - 1] += 1.0 if is_correct else -1.0
    own = [[list(turn) for turn in turns(i)] for i in range(len(LENGTHS))]
    if unit == "token":
        own = [[[t] for turn in each for t in turn] for each in own]
    steps = [[bounds[i] + t for t in step] for i, each in enumerate(own) for step in each]
    counts = torch.tensor([0, *map(len, own)])
    settings = GAE[unit]
    given = (
        [sum(rewards[t] for t in step) for step in steps], [values[step[0]] for step in steps],
        counts.cumsum(0).tolist(),
    )  # fmt: skip
    alpha, gamma = settings["length_adaptive_alpha"], settings["gamma"]
    lams = [max(1 - 1 / (alpha * n), 0.0) for n in counts[1:].tolist()]
    actor, critic = (reference.gae(*given, lam, gamma) for lam in (lams, 1.0))
    found = torch.zeros(2, len(values), dtype=torch.float64)
    for k, step in enumerate(steps):
        found[0, step], found[1, step] = actor[k], critic[k] + given[1][k]
    trained = found[0, problem.mask]
    found[0] = (found[0] - trained.mean()) / trained.std(correction=0)
    return found


def _reference(
    outputs: Tensor,
    losses: dict[str, Expected],
    parameters: dict[str, Tensor],
    advantages: dict[str, Tensor] | None = None,
) -> Reference:
    """AdamW's first update, with bias correction m = g and v = g^2 (Loshchilov and Hutter 2019)."""
    gradients = list(losses.values())[-1].gradients
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    updates = {}
    for name, gradient in gradients.items():
        clipped = gradient * min(1.0, CLIP_GRAD / norm)
        parameter = parameters[name].detach()
        decay = OPTIMIZER["weight_decay"] if parameter.dim() > 1 else 0.0
        step = clipped / (clipped.abs() + OPTIMIZER["adam_eps"]) + decay * parameter
        updates[name] = -LEARNING_RATE * step
    return Reference(outputs.detach(), losses, norm, updates, advantages or {})


def actor_loss(
    logprobs: list[float],
    entropy: list[float],
    problem: Problem,
    settings: ActorLoss,
    at: list[float] | None = None,
) -> tuple[float, list[float], list[float]]:
    """(loss, d loss / d logprobs, d loss / d entropy). at: see reference.dis_loss."""
    mask = problem.mask.tolist()
    in_policy = [float(m) for m in mask]
    if settings.sampler_correction == "icepop":
        old, sampled = problem.old_logprobs.tolist(), problem.rollout_logprobs.tolist()
        in_policy = reference.sampler_mask(old, sampled, in_policy, low=0.5, high=5.0, drops=True)
    weights, count = reference.aggregation(in_policy, problem.bounds, settings.loss_aggregation)
    loss, gradient = policy_loss(logprobs, problem, settings, weights, count, at)

    correct = [c for c, (_, n) in zip(problem.is_correct.tolist(), LENGTHS) for _ in range(n)]
    positives = float(sum(m and c for m, c in zip(mask, correct)))
    ones = [float(m) for m in mask]
    mu, beta = settings.positive_lm_coef, settings.entropy_coef
    loss += mu * reference.positive_lm_loss(logprobs, ones, correct, count=positives)
    for t, (m, c) in enumerate(zip(mask, correct)):
        gradient[t] -= mu * float(m and c) / positives
    loss -= beta * sum(w * h for w, h in zip(weights, entropy)) / count
    frozen = problem.reference_logprobs.tolist()
    kl, by_logprob = reference.reference_kl(logprobs, frozen, weights, count=count)
    loss += settings.kl_coef * kl
    gradient = [g + settings.kl_coef * k for g, k in zip(gradient, by_logprob)]
    return loss, gradient, [-beta * w / count for w in weights]


def policy_loss(
    logprobs: list[float],
    problem: Problem,
    settings: ActorLoss,
    weights: list[float],
    count: float,
    at: list[float] | None,
) -> tuple[float, list[float]]:
    """(loss, d loss / d logprobs)."""
    if settings.policy_loss == "none":
        return 0.0, [0.0] * len(logprobs)
    scale, shift = settings.advantage_scale, settings.advantage_shift
    advantages = (problem.advantages * scale + shift).tolist()
    if settings.policy_loss == "ppo_clip":
        clips = dict(clip_low=settings.clip_low, clip_high=settings.clip_high, count=count)
        given = (logprobs, problem.old_logprobs.tolist(), advantages, weights)
        return reference.policy_loss(*given, **clips)
    given = (logprobs, problem.rollout_logprobs.tolist(), advantages, weights)
    if settings.policy_loss == "dis":
        low, high = settings.dis_clip_low, settings.dis_clip_high
        return reference.dis_loss(*given, low=low, high=high, count=count, at=at)
    difference, cap = settings.dppo_max_difference, settings.dppo_ratio_cap
    bounds = dict(difference=difference, cap=cap)
    return reference.dppo_tv_loss(*given, **bounds, count=count, at=at)


def critic_loss(
    values: list[float], problem: Problem, settings: CriticLoss
) -> tuple[float, list[float]]:
    """(loss, d loss / d value head)."""
    weights = [float(m) for m in problem.mask.tolist()]
    arguments = dict(
        count=sum(weights), old_values=problem.old_values.tolist(), clip=settings.value_clip
    )
    returns, slopes = problem.returns.tolist(), [1.0] * len(values)
    if settings.value_range is not None:
        ranged = [reference.ranged_value(z, *settings.value_range) for z in values]
        values, slopes = [v for v, _ in ranged], [slope for _, slope in ranged]
    loss, gradient = reference.value_loss(values, returns, weights, **arguments)
    return loss, [g * slope for g, slope in zip(gradient, slopes)]


def _gradients(
    outputs: list[Tensor], by_output: list[list[float]], model: Any
) -> dict[str, Tensor]:
    parameters = _trained(model)
    gradients = torch.autograd.grad(
        outputs,
        list(parameters.values()),
        [torch.tensor(g, dtype=torch.float64) for g in by_output],
        retain_graph=True,
    )
    return by_hf_name(dict(zip(parameters, gradients)))


def _trained(model: Any) -> dict[str, Tensor]:
    """Parameters that require a gradient; a peft adapter's by the names in its file."""
    return {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
